"""Tensor parallelism of a decoder by DTensor's parallel styles, with or without Megatron's sequence parallelism.

    tp = 2, sequence parallel          x (B, T/2, E) on each rank; dropout, norms and residuals work on it
      norm -> all-gather T -> q k v of half of the heads -> attention -> o_proj -> reduce-scatter T -> + x
      norm -> all-gather T -> half of gate and up                     -> down   -> reduce-scatter T -> + x

Without sequence parallelism every rank holds all of x, and an all-reduce replaces each reduce-scatter (Korthikanti et al.,
2022, arXiv:2205.05198, section 4.2). With T slots in the CP shard, a layer moves `4 B T E (tp - 1) / tp` elements per rank in
forward and as many in backward. Each direction has four collectives; an all-reduce counts as two.
"""

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longspan.model.decoder import Block, Decoder
from longspan.model.experts import MixtureOfExperts
from longspan.model.loss import VocabShard, token_loss_sum

_SEQUENCE, _HEADS = 1, 1
"""The token dim of (B, T, E), and the head dim of (B, H, T, D)."""


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard the weights of `model` over the 1-D `mesh`, in place, and parallelise its forward.

    Position ids, labels and rotary tables cover all T slots. With `sequence`, hidden states between layers, `tokens` and
    `routing` cover this rank's T / tp. The degree must divide heads, intermediate size and vocabulary (checked by
    `longspan.topology.check_model`), and T.
    """
    hidden = Shard(_SEQUENCE) if sequence else Replicate()
    norm = {"norm": SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)} if sequence else {}
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=hidden)
    styles: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "lm_head": column,
        **norm,
    }
    present = {name: style for name, style in styles.items() if getattr(model, name) is not None}
    parallelize_module(model, mesh, present)
    for block in model.blocks:
        parallelize_module(block, mesh, _styles(block, hidden, column, row))
    model.loss_sum = partial(_loss_sum, mesh=mesh, hidden_placement=hidden, vocab_size=model.config.vocab_size)


def _styles(
    block: Block, hidden: Shard | Replicate, column: ParallelStyle, row: ParallelStyle
) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_layouts=(hidden, None, None, None, None), desired_input_layouts=(Replicate(), None, None, None, None)
        ),
        **{f"self_attn.{name}_proj": column for name in "qkv"},
        "self_attn.o_proj": row,
    }
    if isinstance(hidden, Shard):
        of_tokens = SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
        styles |= {"input_layernorm": of_tokens, "post_attention_layernorm": of_tokens}
    if block.self_attn.q_norm is not None:
        # One weight serves all heads, but a rank has some heads: its gradient is partial, as for a norm over some tokens.
        styles |= {
            f"self_attn.{name}_norm": SequenceParallel(sequence_dim=_HEADS, use_local_output=True) for name in "qk"
        }
    if not isinstance(block.mlp, MixtureOfExperts):
        dense = "mlp"
    else:
        styles["mlp.gate"] = SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
        dense = "mlp.shared_expert" if block.mlp.shared_expert is not None else ""
    if dense:
        styles |= {
            dense: PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
            f"{dense}.gate_proj": column,
            f"{dense}.up_proj": column,
            f"{dense}.down_proj": row,
        }
    return styles


def _loss_sum(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    mesh: DeviceMesh,
    hidden_placement: Shard | Replicate,
    vocab_size: int,
) -> Tensor:
    """Return the loss of all T slots on every rank. Each rank has a part of the vocabulary; logits are not gathered."""
    whole = DTensor.from_local(hidden, mesh, [hidden_placement], run_check=False).redistribute(placements=[Replicate()])
    assert isinstance(weight, DTensor), "the head was cut over the vocabulary"
    rows = weight.to_local()
    vocab = VocabShard(mesh.get_local_rank() * rows.shape[0], vocab_size, mesh.get_group())
    return token_loss_sum(whole.to_local(grad_placements=[Partial()]), labels, rows, vocab=vocab)
