"""The wrappers, recomputation and compilation of training loops around a sharded Hugging Face model, on two or four processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspan import ContextParallel, hf
from longspan.errors import SpecError
from tests.hf.models import LENGTHS, MODELS, alone, documents, packed
from tests.ranks import run_ranks

Tensor = torch.Tensor
TARGETS = sum(LENGTHS) - len(LENGTHS)
KINDS = ("llama", "gpt_oss", "gemma2")


def whole(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name.removeprefix("module.")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def sharded(model: PreTrainedModel, mesh: Any) -> PreTrainedModel:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[PreTrainedModel, Any], nn.Module]] = {
    "fsdp": lambda model, mesh: sharded(model, mesh["dp", "cp"]._flatten("all")),
    "hsdp": lambda model, mesh: sharded(model, mesh),
    "ddp": lambda model, mesh: DistributedDataParallel(
        model, process_group=mesh["dp", "cp"]._flatten("all").get_group()
    ),
}


def gradients_under_wrappers(group: Any, rank: int) -> list[tuple[str, float]]:
    """Return the worst gradient's difference from one rank's by wrapper, for dp 2 x cp 2 with checkpointing, in fp32."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    rows = [documents(LENGTHS, seed) for seed in (1, 2)]
    found = []
    for kind in KINDS:
        plain = MODELS[kind].build(MODELS[kind].plain).float()
        wanted = {}
        for parts in rows:
            _, wanted = alone(plain, parts)  # summed over both
        for name, wrap in WRAPPERS.items():
            model = MODELS[kind].build("longspan").float().train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped = wrap(model, mesh)
            batch = packed(rows[mesh.get_local_rank("dp")])
            count = hf.count_targets([batch], mesh["dp"])
            assert count == 2 * TARGETS
            with hf.sequence(ContextParallel(mesh["cp"]), wrapped, batch, num_targets=count) as seq:
                loss = wrapped(**seq.inputs).loss
            seq.backward(loss)
            got = whole(wrapped)
            assert got.keys() == wanted.keys()
            size = max(float(g.norm()) for g in wanted.values())
            worst = max(float((got[n] - wanted[n] / 2).norm() / max(wanted[n].norm() / 2, 1e-3 * size)) for n in wanted)
            found.append((f"{kind} {name}", worst))
    return found


def test_gradients_under_wrappers_that_average_are_those_of_the_whole_batch() -> None:
    for results in run_ranks(4, gradients_under_wrappers):
        assert {name: worst for name, worst in results if worst > 1e-5} == {}


def a_wrapper_over_dp_alone(group: Any, rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model = sharded(MODELS["llama"].build("longspan"), mesh["dp"])
    with hf.sequence(ContextParallel(mesh["cp"]), model, packed(documents())) as seq:
        loss = model(**seq.inputs).loss
    with pytest.raises(SpecError) as told:
        seq.backward(loss)
    return str(told.value)


def test_a_wrapper_that_leaves_out_ranks_of_the_group_is_refused() -> None:
    for rank, text in enumerate(run_ranks(2, a_wrapper_over_dp_alone)):
        assert text.startswith(
            f"the model's wrapper sums gradients over ranks [{rank}], without ranks [{1 - rank}] of the CP"
        )
        assert "flattened mesh of dp and cp" in text


def run(model: PreTrainedModel, group: Any, batches: list[dict[str, Tensor]], call: Any = None) -> list[Tensor]:
    """Return the loss of each batch, and all gradients."""
    cp, losses, outs = ContextParallel(group), [], []
    for batch in batches:
        with hf.sequence(cp, model, batch) as seq:
            outs.append((seq, (model if call is None else call)(**seq.inputs).loss))
    for seq, loss in outs:  # after every block has ended
        losses.append(loss.detach())
        seq.backward(loss)
    return [*losses, *whole(model).values()]


class Lora(nn.Module):
    """Adds a product of rank 4 to a frozen linear layer, as peft does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.linspace(-1, 1, base.in_features * 4, dtype=torch.double).view(4, -1))
        self.up = nn.Parameter(torch.linspace(-1, 1, base.out_features * 4, dtype=torch.double).view(-1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    model.requires_grad_(False)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Lora(layer.self_attn.q_proj), Lora(layer.self_attn.v_proj)
    return model


def checkpointed(group: Any, rank: int) -> list[tuple[str, bool]]:
    """Whether recomputation changes a bit: both kinds, with and without low-rank adapters, backward after the block."""
    same, batches = [], [packed(documents()), packed(documents([60, 36], 3))]
    for prepare in (lambda model: model, with_lora):
        for kind in ("llama", "gemma3_text"):
            results = []
            for reentrant in (None, False, True):
                model = prepare(MODELS[kind].build("longspan")).train()
                if reentrant is not None:
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                results.append(run(model, group, batches))
            for number, result in enumerate(results[1:]):
                equal = all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))
                same.append((f"{kind} {prepare} {number}", equal))
    return same


def test_recomputation_and_adapters_change_no_bit() -> None:
    for results in run_ranks(2, checkpointed):
        assert len(results) == 8
        assert [name for name, equal in results if not equal] == []


def compiled(group: Any, rank: int) -> list[tuple[str, int, float]]:
    """Return (what was compiled, graphs, difference from eager) over twenty packed batches of equal slots."""
    batches = [packed(documents([5 + n, 50 - 2 * n, 41 + n], seed=n)) for n in range(20)]
    found = []
    for kind in ("llama", "gemma3_text"):
        eager = run(MODELS[kind].build("longspan"), group, batches)
        for what in ("layers", "model"):
            torch._dynamo.reset()
            graphs: list[int] = []

            def count(graph: Any, inputs: Any, graphs: list[int] = graphs) -> Any:
                graphs.append(1)
                return graph

            compile_ = partial(torch.compile, fullgraph=True, dynamic=False, backend=count)
            model = MODELS[kind].build("longspan")
            for layer in model.model.layers if what == "layers" else ():
                layer.forward = compile_(layer.forward)
            result = run(model, group, batches, compile_(model) if what == "model" else None)
            worst = max(float((a - b).abs().max()) for a, b in zip(eager, result, strict=True))
            found.append((f"{kind} {what}", len(graphs), worst))
    return found


def test_one_graph_serves_all_packed_batches() -> None:
    """The layers of gemma3 are of two kinds: a graph each. A whole model is one graph."""
    for results in run_ranks(2, compiled):
        assert {name: graphs for name, graphs, _ in results} == {
            "llama layers": 1, "llama model": 1, "gemma3_text layers": 2, "gemma3_text model": 1,
        }  # fmt: skip
        assert max(worst for *_, worst in results) < 1e-12


def saved(group: Any, rank: int, folder: str) -> Tensor:
    """Train one step under FSDP2, save as transformers does, and return the logits of the trained model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = sharded(MODELS["qwen3"].build("longspan").float(), mesh)
    with hf.sequence(ContextParallel(mesh["cp"]), model, packed(documents())) as seq:
        loss = model(**seq.inputs).loss
    seq.backward(loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with hf.sequence(ContextParallel(mesh["cp"]), model, {"input_ids": documents()[0]}) as seq, torch.no_grad():
        logits = seq.unshard(model(**seq.inputs).logits)
    weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)
    dist.barrier()
    return logits


def test_a_trained_model_loads_in_plain_transformers(tmp_path) -> None:
    logits = run_ranks(2, saved, str(tmp_path))[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    torch.testing.assert_close(plain(input_ids=documents()[0]).logits, logits, rtol=1e-5, atol=1e-5)
