"""What to verify: the degrees, layouts and types to compare with one rank, and for how many steps."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from longspan.errors import SpecError
from longspan.train.train_config import CommDtype, Dtype, LayoutName, Positive, RouteName

T = TypeVar("T")


def _check_some(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise SpecError("nothing is given to compare with one rank", hint="give at least one, or leave it out")
    return values


def default_dtypes(dtype: Dtype, device_type: str) -> tuple[Dtype, ...]:
    """The types in which to verify a run of type `dtype`: its own, and fp32, whose tolerance is small. On CPU fp64 too, whose
    rounding hides nothing: there the same kernel computes it. On a GPU fp64 would verify a kernel that no run uses."""
    exact: tuple[Dtype, ...] = ("fp64",) if device_type == "cpu" else ()
    return tuple(dict.fromkeys((*exact, "fp32", dtype)))


class VerifyConfig(BaseModel):
    """The cases of a verification: every degree x layout x route x type x type on the wire."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cp: Annotated[tuple[Positive, ...], AfterValidator(_check_some)] = (2,)
    layouts: Annotated[tuple[LayoutName, ...], AfterValidator(_check_some)] = ("zigzag",)
    routes: Annotated[tuple[RouteName, ...], AfterValidator(_check_some)] = ("ring",)
    comm_dtypes: Annotated[tuple[CommDtype | None, ...], AfterValidator(_check_some)] = (None,)
    dtypes: Annotated[tuple[Dtype, ...], AfterValidator(_check_some)] | None = None
    """None: `default_dtypes` of the run."""
    steps: Positive = 2
    """Optimizer steps to replay; gradients are compared at the first, losses and gradient norms at each."""
    layers: Positive | None = None
    """Cut the model to this many layers, with every kind of mask; None: all."""
    tokens: Annotated[int, Field(ge=2)] | None = None
    """Cut rows to this many tokens, at least the 2 of one target; None: `data.seq_len`."""
