"""Shard the model of a run over its ranks before memory is allocated: layers over pp, heads and vocabulary over tp,
experts over ep, and the remaining parameters over dp x cp by FSDP2.

    meta device -> stages -> tensor parallel -> experts -> compiled blocks -> FSDP2 -> memory -> initial weights
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan.comm.meshes import Meshes
from longspan.model import Decoder, MixtureOfExperts, TransformersConfig, apply_expert_parallel, apply_tensor_parallel
from longspan.model.transformers_model import blocks_of
from longspan.names import DTYPES
from longspan.train.axes import stages_of
from longspan.train.model import TORCH_DTYPES, empty_transformers, first_weights, meta_model
from longspan.train.train_config import TrainConfig, model_config
from longspan.train.transformers_micro import with_longspan


def make_stages(config: TrainConfig, meshes: Meshes) -> list[nn.Module]:
    """Make this rank's wrapped stages with their initial weights: stages pp_rank, pp_rank + pp, ..."""
    shape = model_config(config)
    if isinstance(shape, TransformersConfig):
        return [wrap(with_longspan(empty_transformers(config, shape), config.data.seq_len), meshes, config)]
    layers = stages_of(config, shape)[meshes.data["pp"].get_local_rank() :: meshes.topology.pp]
    return [wrap(meta_model(config, part), meshes, config) for part in layers]


def wrap(model: nn.Module, meshes: Meshes, config: TrainConfig) -> nn.Module:
    """Shard a model on the meta device over the ranks, allocate it and set its initial weights.

    Compiles the `forward` of each decoder block, inside the wrapper's hooks. FSDP2 sums gradients over ranks, DDP averages them.
    Collective over the world.
    """
    device = torch.device(meshes.weights.device_type)
    blocks: Sequence[nn.Module] = model.blocks if isinstance(model, Decoder) else blocks_of(model)
    if isinstance(model, Decoder) and meshes.topology.tp > 1:
        apply_tensor_parallel(model, meshes.weights["tp"], sequence=config.parallel.sp)
    if isinstance(model, Decoder) and meshes.topology.ep > 1:
        apply_expert_parallel(model, meshes.experts["ep"])
    for block in blocks if config.compile else ():
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    if config.parallel.wrapper == "fsdp":
        shard_weights(model, blocks, meshes, config)
    model.to_empty(device=device)
    first_weights(model, config)
    if config.parallel.wrapper == "ddp":
        return DistributedDataParallel(model, process_group=meshes.weights["shard"].get_group())
    return model


def shard_weights(model: nn.Module, blocks: Sequence[nn.Module], meshes: Meshes, config: TrainConfig) -> None:
    """Apply FSDP2: one unit per block, and one for the experts of each block, which have a separate mesh."""
    low = TORCH_DTYPES[config.dtype] if DTYPES[config.dtype].mixed else None
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    shards = meshes.weights["replica", "shard"] if meshes.topology.dp_replicate > 1 else meshes.weights["shard"]
    # Zero-bubble computes weight gradients in a later pass. A unit that reshards would have freed the weights before this pass.
    kept = config.parallel.schedule == "zero-bubble"
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=False if kept else None)
    for block in blocks:
        feed_forward = getattr(block, "mlp", None)
        if isinstance(feed_forward, MixtureOfExperts):
            shard(feed_forward.experts, mesh=meshes.experts["edp"])
        shard(block, mesh=shards)
    shard(model, mesh=shards)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # The groups of units differ in size, so averaged gradients would have different divisors.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def model_of(stage: nn.Module) -> nn.Module:
    """Return the model of a stage, without its DDP wrapper."""
    return stage.module if isinstance(stage, DistributedDataParallel) else stage


def decoder_of(stage: nn.Module) -> Decoder:
    """Return the decoder of a stage, without its DDP wrapper."""
    decoder = model_of(stage)
    assert isinstance(decoder, Decoder), "the run has a decoder of longspan"
    return decoder


def is_owner(parameter: Tensor, meshes: Meshes) -> bool:
    """Whether this rank counts its shard of a parameter in the norm. Exactly one rank counts each shard.

    A plain tensor is replicated over all ranks of a stage. A DTensor's placements give its replicas, except replicas over
    tp if the mesh has no tp axis.
    """
    if not isinstance(parameter, DTensor):
        rank = {**_place(meshes.data), "pp": 0}
        return not any(rank.values())
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if not {"tp", "edp"} & set(names) and meshes.data["tp"].get_local_rank():
        return False
    place = mesh.get_coordinate()
    assert place is not None, "the mesh of a parameter contains this rank"
    return not any(
        index for index, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate()
    )


def _place(mesh: dist.device_mesh.DeviceMesh) -> dict[str, int]:
    place = mesh.get_coordinate()
    assert place is not None, "the mesh contains every rank"
    return dict(zip(mesh.mesh_dim_names or (), place, strict=True))


def gather_whole(stages: Sequence[nn.Module], meshes: Meshes, *, gradients: bool = False) -> dict[str, Tensor]:
    """Gather every unsharded parameter of the model, or its gradient, on the CPU of rank 0. Collective over the world.

    Gathers one parameter at a time within its stage, then broadcasts it within rank 0's pp group. Returns {} on other
    ranks.
    """
    held = dict(_held(stages, gradients))
    if any(index for axis, index in _place(meshes.data).items() if axis != "pp"):
        for tensor in held.values():
            _whole(tensor)
        return {}
    pp, rank = meshes.data["pp"].get_group(), dist.get_rank()
    everyone: list[Any] = [None] * pp.size()
    dist.all_gather_object(everyone, [(name, tuple(x.shape), x.dtype) for name, x in held.items()], group=pp)
    gathered: dict[str, Tensor] = {}
    for sender, tensors in zip(dist.get_process_group_ranks(pp), everyone, strict=True):
        for name, shape, dtype in tensors:
            mine = sender == rank
            whole = _whole(held[name]) if mine else torch.empty(shape, dtype=dtype, device=meshes.data.device_type)
            if pp.size() > 1:
                dist.broadcast(whole, sender, group=pp)
            if rank == 0:
                gathered[name] = whole.to("cpu", copy=True)
    return gathered


def _held(stages: Sequence[nn.Module], gradients: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) of this rank's stages, or (name, gradient) where a gradient exists."""
    for stage in stages:
        for name, parameter in model_of(stage).named_parameters():
            tensor = parameter.grad if gradients else parameter.detach()
            if tensor is not None:
                yield name, tensor


def _whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. Collective over its mesh."""
    return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor.contiguous()
