"""The model of a run, cut over its ranks before it takes memory: layers over pp, heads and vocabulary over tp, experts over
ep, and by FSDP2 what is left over dp x cp.

    meta device -> stages -> tensor parallel -> experts -> compiled blocks -> FSDP2 -> memory -> each rank's first weights
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
from longspan.model import Decoder, MixtureOfExperts, apply_expert_parallel, apply_tensor_parallel
from longspan.names import DTYPES
from longspan.train.axes import stages_of
from longspan.train.model import TORCH_DTYPES, first_weights, meta_model
from longspan.train.train_config import TrainConfig, model_config


def make_stages(config: TrainConfig, meshes: Meshes) -> list[nn.Module]:
    """This rank's stages, wrapped, with their first weights: stage `pp rank`, then every pp-th. Without pp there is one."""
    layers = stages_of(config, model_config(config))[meshes.data["pp"].get_local_rank() :: meshes.topology.pp]
    return [wrap(meta_model(config, part), meshes, config) for part in layers]


def wrap(model: Decoder, meshes: Meshes, config: TrainConfig) -> nn.Module:
    """Cut a model on the meta device over the ranks, give it memory and its first weights.

    What is compiled is a block's own `forward`, inside the hooks by which a wrapper gathers its weights. Gradients are summed
    over ranks by FSDP2, averaged by DDP.
    """
    device = torch.device(meshes.weights.device_type)
    if meshes.topology.tp > 1:
        apply_tensor_parallel(model, meshes.weights["tp"], sequence=config.parallel.sp)
    if meshes.topology.ep > 1:
        apply_expert_parallel(model, meshes.experts["ep"])
    for block in model.blocks if config.compile else ():
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    if config.parallel.wrapper == "fsdp":
        shard_weights(model, meshes, config)
    model.to_empty(device=device)
    first_weights(model, config)
    if config.parallel.wrapper == "ddp":
        return DistributedDataParallel(model, process_group=meshes.weights["shard"].get_group())
    return model


def shard_weights(model: Decoder, meshes: Meshes, config: TrainConfig) -> None:
    """One FSDP2 unit per block, and one for the experts of each, which other ranks share."""
    low = TORCH_DTYPES[config.dtype] if DTYPES[config.dtype].mixed else None
    policy = MixedPrecisionPolicy(
        param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )
    shards = meshes.weights["replica", "shard"] if meshes.topology.dp_replicate > 1 else meshes.weights["shard"]
    # Zero-bubble takes gradients by weights later on, and would not find those that a unit has given back in between.
    kept = config.parallel.schedule == "zero-bubble"
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=False if kept else None)
    for block in model.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            shard(block.mlp.experts, mesh=meshes.experts["edp"])
        shard(block, mesh=shards)
    shard(model, mesh=shards)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Units have groups of different sizes, so an average would weigh them differently.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def decoder_of(module: nn.Module) -> Decoder:
    """The decoder that a stage is, under its wrapper."""
    inner: Decoder = module.module if isinstance(module, DistributedDataParallel) else module  # type: ignore[assignment]
    return inner


def is_owner(parameter: Tensor, meshes: Meshes) -> bool:
    """Whether this rank's shard of a parameter is the one that counts, where other ranks hold copies of it.

    Plain tensors are on all ranks of a stage. A DTensor tells its copies by its placements, but for those over tp where
    tensor parallelism left the parameter alone.
    """
    if not isinstance(parameter, DTensor):
        rank = {**_place(meshes.data), "pp": 0}
        return not any(rank.values())
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if not {"tp", "edp"} & set(names) and meshes.data["tp"].get_local_rank():
        return False
    place = mesh.get_coordinate()
    assert place is not None, "a rank holds what it asks for"
    return not any(
        index for index, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate()
    )


def _place(mesh: dist.device_mesh.DeviceMesh) -> dict[str, int]:
    place = mesh.get_coordinate()
    assert place is not None, "the mesh holds every rank"
    return dict(zip(mesh.mesh_dim_names or (), place, strict=True))


def gather_whole(stages: Sequence[nn.Module], meshes: Meshes, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter of the model, or its gradient, whole, on the CPU of rank 0; an empty mapping on others. Collective.

    One parameter at a time: its shards are gathered within its stage, and the whole goes along rank 0's pipeline.
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
    """The parameters of this rank's stages, or their gradients where there are any, by name."""
    for stage in stages:
        for name, parameter in decoder_of(stage).named_parameters():
            tensor = parameter.grad if gradients else parameter.detach()
            if tensor is not None:
                yield name, tensor


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor; collective over its mesh."""
    return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor.contiguous()
