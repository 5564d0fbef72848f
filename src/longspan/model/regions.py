"""Which part of a whole parameter a rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_region(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The elements that are here, and where they lie in the whole: one slice for each dim. Of a plain tensor, all."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    # Private in torch: nothing public tells the offset of a shard that two axes of a mesh cut along one dim.
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
