"""The mixture of experts against one written out token by token, however tokens and experts are spread over ranks."""

from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from longspan.errors import SpecError
from longspan.model import MixtureOfExperts, Routing
from tests.launches import Launches, on_meta
from tests.ranks import run_ranks

from .experts_reference import DOCUMENTS, NEVER, SHARED, E, F, N, X, answer, make_inputs, moe_config
from .reference import make_config, relative_error

SCALE = 1 / 7
TOKENS = {1: (24,), 2: (17, 7), 4: (10, 0, 9, 5)}
"""Tokens of each rank, in order; of four ranks one has none. Every rank also has three dead slots, which hold NaN."""
NAMES = {  # of the reference: the module's own
    "gate": "gate.weight",
    "gate_up": "experts.gate_up_proj",
    "down": "experts.down_proj",
    "shared_gate": "shared_expert.gate_proj.weight",
    "shared_up": "shared_expert.up_proj.weight",
    "shared_down": "shared_expert.down_proj.weight",
}


class SharedExpert(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.gate_proj = nn.Linear(E, hidden_size, bias=False)
        self.up_proj = nn.Linear(E, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, E, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Case(NamedTuple):
    """How a rank takes part: its tokens by TOKENS, experts over the groups of `ep` neighbouring ranks."""

    changes: dict
    ep: int = 1
    probed: bool = True
    as_dtensor: bool = False
    recompute: bool = False
    dtype: torch.dtype = torch.float64


class Result(NamedTuple):
    out: Tensor
    grads: dict[str, Tensor]
    dead: Tensor
    sums: dict[int, float]
    shapes: list[tuple[int, ...]]


def named(group, axis):
    """A mesh of one axis. Torch remembers groups by it, past their end in the pool: equal meshes must have equal groups."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"experts_{axis}",))


def make_layer(config, inputs, dtype=torch.float64, part=slice(None), layer=3):
    """A layer with the reference's weights, of which it holds `part` of the experts; nothing larger is ever allocated."""
    shared = config.experts.shared_intermediate_size
    with torch.device("meta"):
        moe = MixtureOfExperts(config, layer, SharedExpert(shared) if shared else None)
    assert all(parameter.is_meta for parameter in moe.parameters())
    for name, target in NAMES.items():
        if shared or not name.startswith("shared"):
            weight = inputs.weights[name][part] if target.startswith("experts") else inputs.weights[name]
            module, _, key = target.rpartition(".")
            setattr(moe.get_submodule(module), key, nn.Parameter(weight.to(dtype, copy=True)))
    return moe


def make_slots(inputs, config, tokens, dtype=torch.float64):
    """(1, T, E) slots of this rank's tokens with a dead one before, amid and behind them, and the routing's tensors."""
    start, stop = tokens
    amid = (stop - start) // 2
    places = [1 + t + (t >= amid) for t in range(stop - start)]
    slots = stop - start + 3
    x = torch.full((1, slots, E), float("nan"), dtype=dtype)
    live, unit = torch.zeros(1, slots, dtype=torch.bool), torch.full((1, slots), -1)
    x[0, places], live[0, places] = inputs.x[start:stop].to(dtype), True
    by_document = config.experts.balance_over == "document"
    unit[0, places] = inputs.document[start:stop] if by_document else 0
    return x.requires_grad_(), live, unit, torch.tensor(DOCUMENTS if by_document else [N]), places


def run_layer(moe, inputs, config, tokens, group, case):
    x, live, unit, unit_tokens, places = make_slots(inputs, config, tokens, case.dtype)
    sums: dict[int, Tensor] = {}
    routing = Routing(live, unit, unit_tokens, group, SCALE, sums)
    if case.recompute:
        context = lambda: create_selective_checkpoint_contexts([])  # noqa: E731
        out = checkpoint(moe, x, routing, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    else:
        out = moe(x, routing)
    probe = torch.zeros_like(out)
    if case.probed:
        probe[0, places] = inputs.probe[slice(*tokens)].to(case.dtype)
    probe[~live] = float("nan")
    out.backward(probe)
    grads = {
        name: moe.get_parameter(target).grad for name, target in NAMES.items() if target in dict(moe.named_parameters())
    }
    grads["x"] = x.grad[0, places]
    grads = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
    dead = torch.cat([out[~live].detach(), x.grad[~live]])
    shapes = [tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape) for p in moe.experts.parameters()]
    return Result(out[0, places].detach(), grads, dead, {k: float(v) for k, v in sums.items()}, shapes)


def _run(group, rank, case):
    size = dist.get_world_size(group)
    config, inputs = moe_config(**case.changes), make_inputs(case.dtype)
    own = [dist.new_group(list(range(first, first + case.ep))) for first in range(0, size, case.ep)][rank // case.ep]
    part = X // case.ep
    first = rank % case.ep * part
    moe = make_layer(config, inputs, case.dtype, slice(first, first + part))
    if case.as_dtensor:
        mesh = named(own, "ep")
        for name, parameter in list(moe.experts.named_parameters()):
            sharded = DTensor.from_local(parameter.detach(), mesh, [Shard(0)])
            moe.experts.register_parameter(name, nn.Parameter(sharded))
    if case.ep > 1:
        moe.experts.group = own
    start = sum(TOKENS[size][:rank])
    return run_layer(moe, inputs, config, (start, start + TOKENS[size][rank]), group, case)


def gather(results, ep):
    """One result of all ranks: tokens put together, gradients of what several ranks hold summed."""
    names = results[0].grads
    grads = {
        name: sum(result.grads[name] for result in results) for name in names if name not in ("x", "gate_up", "down")
    }
    grads["x"] = torch.cat([result.grads["x"] for result in results])
    for name in ("gate_up", "down"):
        parts = [sum(result.grads[name] for result in results[place::ep]) for place in range(ep)]
        grads[name] = torch.cat(parts)
    dead = torch.cat([result.dead for result in results])
    sums = {3: sum(result.sums[3] for result in results)} if results[0].sums else {}
    return Result(torch.cat([result.out for result in results]), grads, dead, sums, [])


def check(result, right, tolerance=1e-10):
    assert relative_error(result.out, right.out) < tolerance
    for name, grad in result.grads.items():
        if right.grads[name].any():
            assert relative_error(grad, right.grads[name]) < tolerance, name
        else:
            assert not grad.any(), name
    assert not result.dead.any(), "dead slots: output and gradient are exactly 0"
    if result.sums:
        assert result.sums[3] == pytest.approx(right.balance_sum, rel=tolerance)


def run_case(ranks, case):
    results = run_ranks(ranks, _run, case) if ranks > 1 else [_alone(case)]
    check(gather(results, case.ep), answer(make_inputs(), moe_config(**case.changes), scale=SCALE, probed=case.probed))
    return results


def _alone(case):
    config, inputs = moe_config(**case.changes), make_inputs(case.dtype)
    return run_layer(make_layer(config, inputs, case.dtype), inputs, config, (0, N), None, case)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": 0},
        {"normalise": False},
        {"normalise": False, "top_k": 1},
        {"top_k": 3, "balance": 0.1},
        {"top_k": X, "balance": 0.1, "balance_over": "document"},
    ],
)
def test_one_rank_equals_a_loop_over_tokens(changes):
    result = _alone(Case(changes))
    right = answer(make_inputs(), moe_config(**changes), scale=SCALE)
    check(result, right)
    assert bool(result.sums) == ("balance" in changes)
    if changes.get("top_k") != X:
        assert not right.grads["gate_up"][NEVER].any()
    assert right.grads["gate"].any()


@pytest.mark.parametrize("balance_over", ["batch", "document"])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_values_and_gradients_do_not_depend_on_where_tokens_and_experts_are(ranks, ep, balance_over):
    case = Case({"balance": 0.1, "balance_over": balance_over}, ep, as_dtensor=ep == 2)
    for result in run_case(ranks, case):
        assert result.shapes == [(X // ep, 2 * F, E), (X // ep, E, F)]


def test_three_experts_a_token_without_a_shared_one():
    run_case(4, Case({"top_k": 3, "shared": 0, "normalise": False}, ep=4))


@pytest.mark.parametrize("balance_over", ["batch", "document"])
def test_the_gradient_of_the_balance_loss_alone_does_not_depend_on_cp(balance_over):
    changes = {"balance": 0.1, "balance_over": balance_over}
    right = answer(make_inputs(), moe_config(**changes), scale=SCALE, probed=False)
    assert right.grads["gate"].abs().max() > 1e-3
    assert not right.grads["down"].any()
    for ranks, ep in ((1, 1), (2, 1), (4, 1), (4, 4)):
        run_case(ranks, Case(changes, ep, probed=False))


def test_the_balance_loss_by_hand():
    # Two experts, probabilities (2/3, 1/3): every token takes the first. f = (1, 0), P = (2/3, 1/3): aux = 2 * 2/3.
    # Documents of 3 and 1 tokens, of which the second's are (1/3, 2/3): both have 4/3, so S = 4 * 4/3 = 16/3.
    # Over the batch f = (3/4, 1/4), P = (7/12, 5/12): aux = 2 * (21/48 + 5/48) = 13/12, S = 13/3.
    for balance_over, right in (("document", 16 / 3), ("batch", 13 / 3)):
        experts = {"num_experts": 2, "top_k": 1, "intermediate_size": 4, "normalise": False, "balance": 1.0}
        config = make_config(hidden_size=2, num_heads=1, num_kv_heads=1, intermediate_size=None, experts=experts)
        moe = MixtureOfExperts(config, 0).double()
        with torch.no_grad():
            for parameter in moe.parameters():
                parameter.zero_()
            moe.gate.weight[:, 0] = torch.tensor([2.0, 1.0], dtype=torch.float64).log()
            moe.gate.weight[:, 1] = torch.tensor([1.0, 2.0], dtype=torch.float64).log()
        x = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]], dtype=torch.float64)[None]
        unit = torch.tensor([[0, 0, 0, 1]]) if balance_over == "document" else torch.zeros(1, 4, dtype=torch.int64)
        unit_tokens = torch.tensor([3, 1] if balance_over == "document" else [4])
        routing = Routing(torch.ones(1, 4, dtype=torch.bool), unit, unit_tokens, None, 1.0)
        moe(x, routing)
        assert float(routing.sums[0]) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2)])
def test_recompute_gives_the_same_gradients_and_counts_once(ranks, ep):
    changes = {"balance": 0.1}
    plain, again = (
        run_ranks(ranks, _run, case) if ranks > 1 else [_alone(case)]
        for case in (Case(changes, ep), Case(changes, ep, recompute=True))
    )
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one.out, other.out)
        assert all(torch.equal(one.grads[name], other.grads[name]) for name in one.grads)
        assert one.sums == other.sums


def test_the_scale_may_be_filled_in_until_backward():
    config, inputs = moe_config(balance=0.1), make_inputs()
    moe = make_layer(config, inputs)
    x, live, unit, unit_tokens, _ = make_slots(inputs, config, (0, N))
    scale = torch.full((), float("nan"), dtype=torch.float64)
    out = moe(x, Routing(live, unit, unit_tokens, None, scale))
    scale.fill_(SCALE)
    out.backward(torch.zeros_like(out))
    right = answer(inputs, config, scale=SCALE, probed=False)
    assert relative_error(moe.gate.weight.grad, right.grads["gate"]) < 1e-10


def test_of_equal_probabilities_the_lower_number_wins():
    moe = make_layer(moe_config(top_k=3), make_inputs())
    seen = []
    moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].tolist()))
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    moe(torch.zeros(2, 3, E, dtype=torch.float64), Routing(zeros == 0, zeros, torch.tensor([6]), None, 1.0))
    assert seen == [[6, 6, 6, 0, 0, 0, 0, 0]]


def test_a_row_of_a_batch_is_routed_like_any_other():
    config, inputs = moe_config(), make_inputs()
    moe, zeros = make_layer(config, inputs), torch.zeros(2, 12, dtype=torch.int64)
    out = moe(inputs.x.view(2, 12, E), Routing(zeros == 0, zeros, torch.tensor([N]), None, 1.0))
    assert relative_error(out.flatten(0, 1), answer(inputs, config, scale=1.0).out) < 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_is_off_by_its_roundings_alone(dtype):
    changes = {"balance": 0.1}
    right = answer(make_inputs(dtype), moe_config(**changes), scale=SCALE)
    result = _alone(Case(changes, dtype=dtype))
    assert result.out.dtype == dtype
    assert {grad.dtype for grad in result.grads.values()} == {dtype}
    check(result, right, tolerance=8 * torch.finfo(dtype).eps)


def test_bf16_rows_travel_as_bf16():
    right = answer(make_inputs(torch.bfloat16), moe_config(), scale=SCALE)
    results = run_ranks(4, _run, Case({}, ep=4, dtype=torch.bfloat16))
    gathered = gather([r._replace(grads={n: g.double() for n, g in r.grads.items()}) for r in results], 4)
    check(gathered, right, tolerance=8 * torch.finfo(torch.bfloat16).eps)
    assert gathered.out.dtype == torch.bfloat16


def _fsdp(group, rank, recompute):
    """Experts as an FSDP2 unit of their own, inside what is recomputed; the mean over ranks becomes a sum by the probe."""
    config, inputs = moe_config(balance=0.1), make_inputs()
    moe = make_layer(config, inputs)
    mesh = named(group, "fsdp")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for unit in (moe.experts, moe):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    start = sum(TOKENS[2][:rank])
    tokens = (start, start + TOKENS[2][rank])
    case = Case({}, recompute=recompute)
    result = run_layer(moe, inputs, config, tokens, group, case)
    grads = {name: 2 * moe.get_parameter(target).grad.full_tensor() for name, target in NAMES.items()}
    return result._replace(grads={"x": result.grads["x"], **grads})


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_are_a_unit_of_fsdp(recompute):
    results = run_ranks(2, _fsdp, recompute)
    right = answer(make_inputs(), moe_config(balance=0.1), scale=SCALE)
    x = torch.cat([result.grads["x"] for result in results])
    for result in results:
        check(result._replace(out=right.out, sums={}, grads=result.grads | {"x": x}), right)


def _tensor_parallel(group, rank):
    """A gate replicated by DTensor over ranks that hold parts of the sequence: its gradient is summed by DTensor."""
    config, inputs = moe_config(shared=0, balance=0.1), make_inputs()
    moe = make_layer(config, inputs)
    mesh = named(group, "tp")
    parallelize_module(moe, mesh, {"gate": SequenceParallel(sequence_dim=1, use_local_output=True)})
    half = slice(rank * N // 2, (rank + 1) * N // 2)
    zeros = torch.zeros(1, N // 2, dtype=torch.int64)
    out = moe(inputs.x[None, half], Routing(zeros == 0, zeros, torch.tensor([N]), group, SCALE))
    out.backward(inputs.probe[None, half])
    return out[0].detach(), moe.gate.weight.grad.full_tensor()


def test_a_gate_of_sequence_parallel_ranks():
    right = answer(make_inputs(), moe_config(shared=0, balance=0.1), scale=SCALE)
    results = run_ranks(2, _tensor_parallel)
    assert relative_error(torch.cat([out for out, _ in results]), right.out) < 1e-10
    assert all(relative_error(grad, right.grads["gate"]) < 1e-10 for _, grad in results)


def _traffic(group, rank):
    """Elements that all-to-alls of rows hand to other ranks, forward and backward; and the formula from the counts."""
    config, inputs = moe_config(), make_inputs()
    size = dist.get_world_size(group)
    part = X // size
    moe = make_layer(config, inputs, part=slice(rank * part, (rank + 1) * part))
    moe.experts.group = group
    start = sum(TOKENS[size][:rank])
    x, live, unit, unit_tokens, _ = make_slots(inputs, config, (start, start + TOKENS[size][rank]))
    seen, sent = [], [0]
    moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    original = dist.all_to_all_single

    def spy(output, input, received, sends, **options):
        if input.is_floating_point():
            sent[-1] += sum(sends) - sends[rank]
        return original(output, input, received, sends, **options)

    with patch.object(dist, "all_to_all_single", spy):
        out = moe(x, Routing(live, unit, unit_tokens, group, 1.0))
        sent.append(0)
        out.sum().backward()
    counts = torch.empty(size, X, dtype=torch.int64)
    dist.all_gather_single(counts.view(-1), seen[0], group=group)
    own = slice(rank * part, (rank + 1) * part)
    away = counts[rank].sum() - counts[rank, own].sum()
    come = counts[:, own].sum() - counts[rank, own].sum()
    return sent, int(E * (away + come))


@pytest.mark.parametrize("ranks", [2, 4])
def test_elements_sent_are_those_of_the_counts(ranks):
    for (forward, backward), right in run_ranks(ranks, _traffic):
        assert forward == backward == right > 0


def _largest_allocation(group, rank):
    """Bytes of the largest single allocation of a step with experts that are much larger than the tokens."""
    experts = {"num_experts": 8, "top_k": 2, "intermediate_size": 64}
    config = make_config(hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=None, experts=experts)
    size = dist.get_world_size(group)
    zeros = torch.zeros(1, 8, dtype=torch.int64)

    def step():
        with torch.device("meta"):
            moe = MixtureOfExperts(config, 0)
        whole = sum(parameter.nbytes for parameter in moe.experts.parameters())
        torch.manual_seed(rank)
        moe.gate.weight = nn.Parameter(torch.randn(8, 64))
        for name, parameter in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, nn.Parameter(torch.randn(8 // size, *parameter.shape[1:])))
        moe.experts.group = group if size > 1 else None
        moe(torch.randn(1, 8, 64), Routing(zeros == 0, zeros, torch.tensor([8]), group, 1.0)).sum().backward()
        return whole

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        whole = step()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(sizes), whole


def test_no_rank_allocates_experts_of_others():
    # gate_up_proj is two thirds of the experts' bytes, and the largest single tensor that one rank alone has.
    ((alone, whole),) = run_ranks(1, _largest_allocation)
    assert alone == whole * 2 // 3
    assert [largest for largest, _ in run_ranks(4, _largest_allocation)] == [alone // 4] * 4


def _wrong_part(group, rank):
    config, inputs = moe_config(), make_inputs()
    moe = make_layer(config, inputs)
    moe.experts.group = group
    x, live, unit, unit_tokens, _ = make_slots(inputs, config, (0, N))
    with pytest.raises(SpecError) as error:
        moe(x, Routing(live, unit, unit_tokens, None, 1.0))
    return str(error.value)


def test_experts_that_are_not_cut_are_refused():
    text = (
        "8 experts cannot be 8 on each of 2 ranks\n\n"
        "hint: choose an ep that divides num_experts, set group, and keep only this rank's experts in dim 0"
    )
    assert run_ranks(2, _wrong_part) == [text] * 2


def test_refusals():
    with pytest.raises(SpecError, match=r"layer 2 needs config\.experts, which is None[\s\S]*set experts"):
        MixtureOfExperts(make_config(), 2)
    with pytest.raises(
        SpecError, match=r"shared_intermediate_size is 10, but shared is NoneType[\s\S]*of shared_intermediate_size"
    ):
        MixtureOfExperts(moe_config(), 0)
    with pytest.raises(SpecError, match=r"shared_intermediate_size is 0, but shared is SharedExpert"):
        MixtureOfExperts(moe_config(shared=0), 0, SharedExpert(SHARED))
    config, inputs = moe_config(), make_inputs()
    x, live, unit, unit_tokens, _ = make_slots(inputs, config, (0, N))
    with pytest.raises(
        SpecError, match=r"routing has live \(1, 27\) and unit \(1, 27\), but x \(1, 20, 16\)[\s\S]*like its ids"
    ):
        make_layer(config, inputs)(x[:, :20], Routing(live, unit, unit_tokens, None, 1.0))


def grouped_mm(rows, weights, *, offs):
    """`torch.nn.functional.grouped_mm` of rows (R, K) and weights (X, K, N), in any type: a loop over experts."""
    assert offs.dtype == torch.int32
    starts = [0, *offs.tolist()]
    pieces = [rows[start:stop] @ weight for start, stop, weight in zip(starts, starts[1:], weights, strict=False)]
    return torch.cat(pieces)


@contextmanager
def as_on_cuda(dtype):
    """Experts by the grouped product. That of the CPU has no fp64."""
    product = patch.object(nn.functional, "grouped_mm", grouped_mm) if dtype == torch.float64 else nullcontext()
    with patch("longspan.model.experts.one_kernel", return_value=True), product:
        yield


class Waits(TorchFunctionMode):
    """Counts what a host would wait for a device in: values that it reads."""

    READS = frozenset({"tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__index__"})

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.READS
        return function(*args, **(kwargs or {}))


def _run_grouped(group, rank, case):
    with as_on_cuda(case.dtype):
        return _run(group, rank, case)


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_the_grouped_product_gives_the_same_at_every_degree(ranks, ep):
    case = Case({"balance": 0.1}, ep, as_dtensor=ep == 2)
    if ranks == 1:
        with as_on_cuda(case.dtype):
            results = [_alone(case)]
    else:
        results = run_ranks(ranks, _run_grouped, case)
    check(gather(results, ep), answer(make_inputs(), moe_config(balance=0.1), scale=SCALE))


def test_torchs_grouped_product_equals_the_loop_bit_for_bit():
    case = Case({"balance": 0.1}, dtype=torch.float32)
    loop = _alone(case)
    with as_on_cuda(case.dtype):
        one = _alone(case)
    assert torch.equal(one.out, loop.out)
    assert all(torch.equal(one.grads[name], loop.grads[name]) for name in loop.grads)


def test_one_rank_never_waits_for_the_device_and_launches_as_much_for_any_number_of_experts():
    # A meta tensor has no values to read: whatever waited for one would raise.
    launched = []
    for num_experts in (4, 64):
        experts = {"num_experts": num_experts, "top_k": 2, "intermediate_size": 32, "balance": 0.1}
        config = make_config(hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=None, experts=experts)
        with torch.device("meta"), as_on_cuda(torch.bfloat16), Launches() as seen:
            moe = MixtureOfExperts(config, 0).bfloat16()
            x, zeros = on_meta(1, 1000, 64).requires_grad_(), on_meta(1, 1000, dtype=torch.int64)
            routing = Routing(zeros == 0, zeros, on_meta(1, dtype=torch.int64), None, 1.0, slots=zeros[0, :990])
            moe(x, routing).backward(on_meta(1, 1000, 64))
        assert seen.counts["_grouped_mm"] == 2 + 4
        launched.append(seen.total)
    assert launched[0] == launched[1] < 120


def _waits(group, rank):
    config, inputs = moe_config(balance=0.1), make_inputs(torch.float32)
    moe = make_layer(config, inputs, torch.float32, slice(rank * X // 2, (rank + 1) * X // 2))
    moe.experts.group = group
    x, live, unit, unit_tokens, _ = make_slots(inputs, config, (0, N), torch.float32)
    routing = Routing(live, unit, unit_tokens, group, SCALE, slots=live.flatten().nonzero()[:, 0])
    with as_on_cuda(torch.float32), Waits() as seen:
        moe(x, routing)
    return seen.count


def test_ranks_that_exchange_rows_wait_once_a_layer():
    assert run_ranks(2, _waits) == [1, 1]
