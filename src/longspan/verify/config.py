"""What to verify: the degrees, layouts and types to compare with one rank, and for how many steps."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from longspan.train.config import Dtype, LayoutName, Positive


class VerifyConfig(BaseModel):
    """The cases of a verification: every degree x layout x type."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cp: Annotated[tuple[Positive, ...], Field(min_length=1)] = (2,)
    layouts: Annotated[tuple[LayoutName, ...], Field(min_length=1)] = ("zigzag",)
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] = ("fp64", "fp32")
    steps: Positive = 2
    """Optimizer steps to replay; gradients are compared at the first, losses and gradient norms at each."""
