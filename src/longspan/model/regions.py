"""The part of an unsharded parameter that a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_region(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return (local elements, one slice per dim of the unsharded parameter). A plain tensor is unsharded."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # Private in torch: no public function returns the offset of a shard of one dim sharded over two mesh axes.
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
