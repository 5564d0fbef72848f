"""Expert parallelism: each rank of the EP axis holds complete experts, an equal number of every layer's experts."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from longspan.model.decoder import Decoder
from longspan.model.experts import MixtureOfExperts


def apply_expert_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard the experts of `model` over the 1-D `mesh`, in place. Forward then sends tokens to their experts and back."""

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    for block in model.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            distribute_module(block.mlp.experts, mesh, cut)
            block.mlp.experts.group = mesh.get_group()
