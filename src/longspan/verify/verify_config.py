"""The cases of a verification: degrees, layouts, routes and dtypes to compare with CP=1, and the number of steps."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from longspan.errors import SpecError
from longspan.train.train_config import CommDtype, Dtype, LayoutName, Positive, RouteName

T = TypeVar("T")


def _check_some(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise SpecError(
            "the list of values to verify is empty", hint="give at least one value, or leave the option out"
        )
    return values


def default_dtypes(dtype: Dtype, device_type: str) -> tuple[Dtype, ...]:
    """Return the dtypes in which to verify a run in `dtype`: the run's dtype, and fp32 for its small tolerance. On CPU
    also fp64, which uses the same kernel with negligible rounding errors. On a GPU, fp64 uses a kernel that no run uses."""
    exact: tuple[Dtype, ...] = ("fp64",) if device_type == "cpu" else ()
    return tuple(dict.fromkeys((*exact, "fp32", dtype)))


class VerifyConfig(BaseModel):
    """The cases of a verification: every degree x layout x route x dtype x communication dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cp: Annotated[tuple[Positive, ...], AfterValidator(_check_some)] = (2,)
    layouts: Annotated[tuple[LayoutName, ...], AfterValidator(_check_some)] = ("zigzag",)
    routes: Annotated[tuple[RouteName, ...], AfterValidator(_check_some)] = ("ring",)
    comm_dtypes: Annotated[tuple[CommDtype | None, ...], AfterValidator(_check_some)] = (None,)
    dtypes: Annotated[tuple[Dtype, ...], AfterValidator(_check_some)] | None = None
    """Default: `default_dtypes` of the run."""
    steps: Positive = 2
    """Optimizer steps to replay. Gradients are compared at the first step, losses and gradient norms at every step."""
    layers: Positive | None = None
    """Cut the model to this many layers, keeping every kind of mask. Default: all layers."""
    tokens: Annotated[int, Field(ge=2)] | None = None
    """Cut rows to this many tokens. Default: `data.seq_len`."""
