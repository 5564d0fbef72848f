"""One rank's part of a micro-batch: the inputs of a decoder.

Batch -> masks, layout and plans -> shard over cp -> under sp, shard tokens and routing over tp
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from longspan.comm.meshes import Meshes
from longspan.comm.upload import upload
from longspan.cp.context import Sequence as Sharded
from longspan.cp.masks import documents_mask
from longspan.cp.upipe import Projections, Transform
from longspan.data import Batch
from longspan.model import Attend, Routing, SelfAttention, WholeLayer, count_targets
from longspan.model.model_config import ExpertsConfig, ModelConfig
from longspan.model.transformers_config import TransformersConfig
from longspan.names import window_of
from longspan.plan import Mask
from longspan.train.axes import layers_by_mask
from longspan.train.train_config import TrainConfig

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Micro:
    """Decoder inputs over the T slots of a rank. Under sp, `tokens` and `routing` cover this tp rank's T/tp slots."""

    input_ids: Tensor
    """(1, T), int64."""
    position_ids: Tensor
    """(1, T), int64; -1 in padding slots."""
    labels: Tensor
    """(1, T), int64, already shifted; -100 marks a slot without a target."""
    num_targets: int
    """Number of labels other than -100, counted on the host."""
    attend: Attend
    tokens: Tensor | None
    """Number of each token in the run, for dropout. None without dropout."""
    routing: Routing | None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `Decoder.forward`."""
        return {
            "position_ids": self.position_ids, "attend": self.attend, "labels": self.labels, "tokens": self.tokens,
            "routing": self.routing,
        }  # fmt: skip


def make_micro(
    batch: Batch,
    sequence: Sharded,
    meshes: Meshes,
    config: TrainConfig,
    experts: ExpertsConfig | None,
    balance_scale: Tensor,
) -> Micro:
    """Return this rank's part of `batch`, sharded by `sequence` and moved to the device."""
    device = meshes.data.device_type
    tp, sp = meshes.data["tp"], config.parallel.sp and meshes.topology.tp > 1

    def part(x: Tensor) -> Tensor:
        return x.chunk(tp.size(), dim=1)[tp.get_local_rank()].contiguous() if sp else x

    lengths = batch.lengths if experts is not None and experts.balance_over == "document" else (batch.seq_len,)
    whole = batch.tensors()
    if config.dropout and batch.numbers is not None:
        whole["tokens"] = torch.from_numpy(batch.numbers.copy())[None]
    if experts is not None:
        whole["unit"] = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))[None]
    on_host = sequence.shard(whole, dim=1)
    # Read values on the host, so that the host does not wait for the device.
    num_targets, live = count_targets(on_host["labels"]), part(on_host["position_ids"] >= 0)
    local = {name: upload(x, device) for name, x in on_host.items()}
    tokens, unit, routing = local.pop("tokens", None), local.pop("unit", None), None
    if unit is not None:
        routing = Routing(
            live=upload(live, device),
            unit=part(unit),
            unit_tokens=upload(torch.tensor(lengths), device),
            group=meshes.tokens if meshes.topology.tp * meshes.topology.cp > 1 else None,
            scale=balance_scale,
            slots=upload(live.flatten().nonzero()[:, 0], device),
        )
    tokens = None if tokens is None else part(tokens)
    return Micro(**local, num_targets=num_targets, attend=_attend(sequence, config), tokens=tokens, routing=routing)


def _attend(sequence: Sharded, config: TrainConfig) -> Attend:
    if not sequence.staged:
        return lambda q, k, v, mask: sequence.attention(q, k, v, mask=mask)
    heads_per_stage = config.parallel.heads_per_stage

    def run(x: Tensor, layer: SelfAttention, rotate: Transform, mask: str) -> Tensor:
        maps = projections_of(layer, rotate)
        return sequence.projected_attention(x, maps, mask=mask, heads_per_stage=heads_per_stage)

    return WholeLayer(run)


def projections_of(layer: SelfAttention, rotate: Transform) -> Projections:
    """Return a layer's projections, with QK-norm and rotary embedding, for route "upipe"."""

    def on(norm: nn.Module | None) -> Transform:
        return rotate if norm is None else lambda heads: rotate(norm(heads))

    return Projections(
        layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight, layer.o_proj.weight, layer.head_dim,
        on_q=on(layer.q_norm), on_k=on(layer.k_norm),
        used=tuple(norm.weight for norm in (layer.q_norm, layer.k_norm) if norm is not None),
    )  # fmt: skip


def visible_pairs(batch: Batch, model: ModelConfig | TransformersConfig) -> int:
    """Number of visible (query, key) pairs of a micro-batch, summed over all layers and counted once over all ranks."""
    layers = layers_by_mask(model)
    if isinstance(model, TransformersConfig):
        from longspan.hf.mask_kinds import mask_of  # loads transformers, which a decoder of longspan does not need

        return sum(number * mask_of(kind, batch.lengths).area for kind, number in layers.items())
    return sum(layers[name] * mask.area for name, mask in masks_of(batch, tuple(layers)).items())


def masks_of(batch: Batch, names: Sequence[str]) -> dict[str, Mask]:
    """Return the named masks of a micro-batch: causal within each document, with the window of the name."""
    return {name: documents_mask(batch.lengths, batch.parents, window_of(name)) for name in names}
