"""The decoder: what attention is given, what recomputation and FSDP2 may not change, what dead slots may not do."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from longspan.errors import SpecError
from longspan.model import Decoder

from .reference import dense_attend, make_config, relative_error

CALLS = {"forward": 0}


@torch.library.custom_op("longspan_test::attend", mutates_args=())
def counted_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    CALLS["forward"] += 1
    return dense_attend(q, k, v, "full").clone()


def _backward(ctx, grad):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        return torch.autograd.grad(dense_attend(*leaves, "full"), leaves, grad)


counted_attend.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def make_model(dtype=torch.float64, *, recompute="none", saved_ops=("longspan_test::attend",), **changes):
    torch.manual_seed(0)
    return Decoder(make_config(init_std=0.2, **changes), recompute=recompute, saved_ops=saved_ops).to(dtype)


def gradients(model, inputs, attend=dense_attend):
    ids, positions, labels = inputs
    loss = model(ids, positions, attend, labels)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("tie", [False, True])
def test_labels_give_the_loss_of_the_logits(inputs, tie):
    model = make_model(tie_embeddings=tie)
    ids, positions, labels = inputs
    hidden = model(ids, positions, dense_attend)
    assert hidden.shape == (2, 13, 32)
    logits = model.logits(hidden)
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, positions, dense_attend, labels), right, rtol=1e-12, atol=0)


def test_attend_gets_unexpanded_heads_and_the_layers_mask(inputs):
    seen = []

    def attend(q, k, v, mask):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), mask))
        return dense_attend(q, k, v, mask)

    make_model(windows=(None, 4), head_dim=6)(*inputs[:2], attend)
    shapes = ((2, 4, 13, 6), (2, 2, 13, 6), (2, 2, 13, 6))
    assert seen == [(*shapes, "full"), (*shapes, "window-4")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_q_k_v_have_the_models_dtype(inputs, dtype, qk_norm):
    seen = set()

    def attend(q, k, v, mask):
        seen.update((q.dtype, k.dtype, v.dtype))
        return dense_attend(q, k, v, mask)

    assert make_model(dtype, qk_norm=qk_norm)(*inputs[:2], attend).dtype == dtype
    assert seen == {dtype}


def test_bf16_norms_and_rotations_lose_no_more_than_one_rounding(inputs):
    wide, narrow = make_model(), make_model(torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())
    x = torch.randn(2, 13, 32).bfloat16()
    right = wide.norm(x.double())
    assert ((narrow.norm(x).double() - right).abs() <= 2**-8 * right.abs()).all()


def test_order_of_slots_does_not_matter_to_what_is_local(inputs):
    # Slots in the order of a zigzag shard, each with its own position: the same values, permuted.
    ids, positions, _ = inputs
    order = torch.tensor([0, 1, 6, 7, 12, 2, 3, 4, 5, 8, 9, 10, 11])
    back = order.argsort()
    model = make_model(qk_norm=True)

    def attend(q, k, v, mask):
        return dense_attend(q[:, :, back], k[:, :, back], v[:, :, back], mask)[:, :, order]

    whole = model(ids, positions, dense_attend)
    shuffled = model(ids[:, order], positions[:, order], attend)
    assert relative_error(shuffled, whole[:, order]) < 1e-13


def test_dead_slots_are_finite_and_give_no_gradient(inputs):
    ids, positions, labels = (x.clone() for x in inputs)
    ids[:, 9:], positions[:, 9:], labels[:, 8:] = -1, -1, -100
    model, short = make_model(), make_model()
    loss, grads = gradients(model, (ids, positions, labels))
    right, right_grads = gradients(short, (ids[:, :9], positions[:, :9], labels[:, :9]))
    assert model(ids, positions, dense_attend).isfinite().all()
    assert relative_error(loss, right) < 1e-13
    assert all(relative_error(grads[name], right_grads[name]) < 1e-12 for name in grads)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_an_empty_shard_gives_zero_gradients_to_every_parameter(recompute):
    def attend(q, k, v, mask):
        return q + 0 * (k.sum() + v.sum())

    empty = torch.zeros(1, 0, dtype=torch.int64)
    loss, grads = gradients(make_model(recompute=recompute), (empty, empty, empty), attend)
    assert loss.item() == 0.0
    assert all(grad is not None and not grad.any() for grad in grads.values())


def test_recompute_gives_the_same_gradients_and_repeats_no_saved_operator(inputs):
    def attend(q, k, v, mask):
        return counted_attend(q, k, v)

    right = gradients(make_model(), inputs)
    for recompute, saved_ops, calls in (
        ("none", (), 2),
        ("block", ("longspan_test::attend",), 2),
        ("block", (), 4),
        ("block", ("longspan_test::atten",), 4),
        ("full", ("longspan_test::attend",), 4),
    ):
        CALLS["forward"] = 0
        loss, grads = gradients(make_model(recompute=recompute, saved_ops=saved_ops), inputs, attend)
        assert CALLS["forward"] == calls, (recompute, saved_ops)
        assert torch.equal(loss, right[0])
        assert all(relative_error(grads[name], right[1][name]) < 1e-13 for name in grads)


def test_recompute_keeps_less(inputs):
    def kept(recompute):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            make_model(recompute=recompute)(*inputs[:2], dense_attend)
        return sum(sizes)

    assert kept("block") < kept("none") / 4


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_fsdp_gathers_the_head_and_repeats_no_saved_operator(inputs, group_of_one, recompute):
    right, right_grads = gradients(make_model(), inputs)
    model = make_model(recompute=recompute)
    for block in model.layers:
        fully_shard(block, mesh=group_of_one)
    fully_shard(model, mesh=group_of_one)
    CALLS["forward"] = 0
    loss, grads = gradients(model, inputs, lambda q, k, v, mask: counted_attend(q, k, v))
    assert CALLS["forward"] == 2
    assert torch.equal(loss, right)
    assert all(relative_error(grads[name].full_tensor(), right_grads[name]) < 1e-12 for name in grads)


def test_fsdp_mixed_precision_may_not_round_the_rotary_tables(inputs, group_of_one):
    for cast in (True, False):
        model = make_model(torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
        for module in (*model.layers, model):
            fully_shard(module, mesh=group_of_one, mp_policy=policy)
        if cast:
            with pytest.raises(SpecError, match=r"are torch.bfloat16[\s\S]*cast_forward_inputs=False"):
                gradients(model, inputs)
        else:
            _, grads = gradients(model, inputs)
            assert all(grad.dtype == torch.float32 and grad.full_tensor().isfinite().all() for grad in grads.values())


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_compiled_and_eager_are_equal(inputs, recompute):
    loss, grads = gradients(make_model(recompute=recompute), inputs)
    compiled = make_model(recompute=recompute)
    compiled.compile(backend="aot_eager", fullgraph=True)
    compiled_loss, compiled_grads = gradients(compiled, inputs)
    assert relative_error(compiled_loss, loss) < 1e-13
    assert all(relative_error(compiled_grads[name], grads[name]) < 1e-12 for name in grads)


def test_a_step_runs_on_the_meta_device():
    with torch.device("meta"):
        ids = torch.zeros(2, 13, dtype=torch.int64)
        loss, grads = gradients(
            make_model(torch.bfloat16), (ids, ids, ids), lambda q, k, v, mask: q + k.sum() + v.sum()
        )
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert grads["lm_head.weight"].shape == (61, 32)


def test_meta_construction_then_init_equals_direct_construction():
    config = make_config(qk_norm=True)
    torch.manual_seed(3)
    direct = Decoder(config).state_dict()
    with torch.device("meta"):
        late = Decoder(config)
    assert all(parameter.is_meta for parameter in late.parameters())
    torch.manual_seed(3)
    late.to_empty(device="cpu").init_weights()
    assert all(torch.equal(direct[name], tensor) for name, tensor in late.state_dict().items())


def test_initial_scales():
    torch.manual_seed(0)
    state = Decoder(make_config(hidden_size=256, intermediate_size=512, num_layers=8, init_std=0.1)).state_dict()
    assert torch.equal(state["norm.weight"], torch.ones(256))
    for name, std in (
        ("embed_tokens.weight", 0.1),
        ("lm_head.weight", 0.1),
        ("layers.7.self_attn.q_proj.weight", 0.1),
        ("layers.7.self_attn.o_proj.weight", 0.025),
        ("layers.0.mlp.down_proj.weight", 0.025),
    ):
        assert float(state[name].std()) == pytest.approx(std, rel=0.05), name


def test_tied_embeddings_have_one_weight():
    model = make_model(tie_embeddings=True)
    assert "lm_head.weight" not in model.state_dict()
    assert model.head_weight is model.embed_tokens.weight


@pytest.mark.parametrize(
    "positions", [torch.arange(13), torch.arange(12).expand(2, 12), torch.zeros(2, 13), torch.zeros(3, 2, 13).long()]
)
def test_positions_are_required_for_each_id(inputs, positions):
    with pytest.raises(SpecError, match=r"position_ids are \([\s\S]*sharded like the ids"):
        make_model()(inputs[0], positions, dense_attend)


def test_unknown_recompute_lists_the_choices():
    with pytest.raises(SpecError, match=r"recompute 'all' is unknown[\s\S]*\['none', 'block', 'full'\]"):
        Decoder(make_config(), recompute="all")
