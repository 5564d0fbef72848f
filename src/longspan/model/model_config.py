"""The architecture of a decoder as a frozen, validated record.
The record holds the values that determine parameters and layer masks, and no value that may change between runs."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from longspan.errors import SpecError
from longspan.names import mask_name


class LinearRopeScaling(BaseModel):
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595): positions are divided by `factor`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["linear"]
    factor: float = Field(ge=1.0)

    def max_positions(self, own: int) -> int:
        """Return the number of positions that the scaling is made for. `own`: that of the model without it."""
        return round(self.factor * own)

    def transformers_entries(self) -> dict[str, Any]:
        """Return the entries of `rope_parameters`, except `rope_theta`."""
        return {"rope_type": "linear", "factor": self.factor}


class YarnRopeScaling(BaseModel):
    """YaRN (Peng et al., 2023, arXiv:2309.00071): "NTK-by-parts" interpolation, and scores scaled by a temperature.

    Dims that turn more than `beta_fast` times within `original_max_positions` are kept, dims that turn less than `beta_slow`
    times are divided by `factor`, and those in between are interpolated. Queries and keys are scaled by
    `attention_factor`, by default `0.1 ln(factor) + 1`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["yarn"]
    factor: float = Field(ge=1.0)
    original_max_positions: int = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0.0)
    beta_slow: float = Field(default=1.0, gt=0.0)
    attention_factor: float | None = Field(default=None, gt=0.0)

    def max_positions(self, own: int) -> int:
        """Return the number of positions that the scaling is made for. `own`: that of the model without it, unused."""
        return round(self.factor * self.original_max_positions)

    def transformers_entries(self) -> dict[str, Any]:
        """Return the entries of `rope_parameters`, except `rope_theta`."""
        entries = {
            "rope_type": "yarn", "factor": self.factor, "original_max_position_embeddings": self.original_max_positions,
            "beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "attention_factor": self.attention_factor,
        }  # fmt: skip
        return {key: value for key, value in entries.items() if value is not None}


class Llama3RopeScaling(BaseModel):
    """Frequency scaling of Llama 3.1 (`rope_type` "llama3" at Hugging Face, `use_scaled_rope` at Meta).

    Wavelengths up to `original_max_positions / high_freq_factor` tokens are kept. Wavelengths from
    `original_max_positions / low_freq_factor` on are multiplied by `factor`. In between, frequencies are interpolated.
    The table depends only on the configuration, not on the length of a batch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1.0)
    low_freq_factor: float = Field(gt=0.0)
    high_freq_factor: float = Field(gt=0.0)
    original_max_positions: int = Field(gt=0)

    @model_validator(mode="after")
    def _check_band(self) -> "Llama3RopeScaling":
        if self.high_freq_factor <= self.low_freq_factor:
            raise SpecError(
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor {self.low_freq_factor}",
                hint="Llama 3.1 uses low_freq_factor=1.0 and high_freq_factor=4.0",
            )
        return self

    def max_positions(self, own: int) -> int:
        """Return the number of positions that the scaling is made for. `own`: that of the model without it, unused."""
        return round(self.factor * self.original_max_positions)

    def transformers_entries(self) -> dict[str, Any]:
        """Return the entries of `rope_parameters`, except `rope_theta`."""
        return {
            "rope_type": "llama3", "factor": self.factor, "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor, "original_max_position_embeddings": self.original_max_positions,
        }  # fmt: skip


RopeScaling = Annotated[LinearRopeScaling | YarnRopeScaling | Llama3RopeScaling, Field(discriminator="kind")]
"""A change of the rotary frequencies, by its `kind`."""


class ExpertsConfig(BaseModel):
    """A mixture of experts in place of every layer's feed-forward. See `longspan.model.MixtureOfExperts`.

    Each token is routed to the `top_k` most probable of `num_experts` experts; each expert has `intermediate_size`. If
    `shared_intermediate_size` is above 0, a shared expert of that size sees every token. With `normalise`, the weights of
    a token's experts are divided by their sum; else the weights are the router's probabilities. `balance` is the coefficient
    of the auxiliary balance loss (0 for none), computed over the global micro-batch ("batch") or over each document.

    Raises `pydantic.ValidationError`: see `ModelConfig`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    shared_intermediate_size: int = Field(default=0, ge=0)
    normalise: bool = True
    balance: float = Field(default=0.0, ge=0.0)
    balance_over: Literal["batch", "document"] = "batch"

    @model_validator(mode="after")
    def _check_top_k(self) -> "ExpertsConfig":
        if self.top_k > self.num_experts:
            raise SpecError(
                f"top_k {self.top_k} is more than {self.num_experts} experts",
                hint=f"set top_k to at most {self.num_experts}, or num_experts to at least {self.top_k}",
            )
        if self.top_k == 1 and self.normalise:
            raise SpecError(
                "top_k 1 with normalise=true makes every weight 1: the router would get no gradient from the loss",
                hint="set normalise=false, or top_k to 2 or more",
            )
        return self

    def num_parameters(self, hidden_size: int) -> int:
        """Return the parameters of one layer's router, experts and shared expert."""
        widths = self.num_experts * self.intermediate_size + self.shared_intermediate_size
        return self.num_experts * hidden_size + 3 * hidden_size * widths


class ModelConfig(BaseModel):
    """The architecture of a Llama-like decoder.

    Exactly one of `intermediate_size` and `experts` is given. `head_dim` 0 means `hidden_size // num_heads`. `windows`, in
    tokens, is empty (full attention in every layer) or has one entry per layer: `None` ("full" in a file), or `w` for a
    sliding window in which query `i` sees keys `i - w + 1` to `i`. `rope_scaling` is `None` or a `Llama3RopeScaling`.

    Raises `pydantic.ValidationError` (a `ValueError`) with the values, the rule and a hint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(default=0, ge=0, validate_default=True)
    intermediate_size: int | None = Field(default=None, gt=0)
    experts: ExpertsConfig | None = None
    rope_theta: float = Field(default=10000.0, gt=0.0)
    rope_scaling: Llama3RopeScaling | None = None
    norm_eps: float = Field(default=1e-5, gt=0.0)
    tie_embeddings: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    init_std: float = Field(default=0.02, gt=0.0)

    @property
    def heads(self) -> tuple[int, int]:
        """(query heads, KV heads) of every layer."""
        return self.num_heads, self.num_kv_heads

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The mask name of each layer, passed to `attend`: "full" or "window-<w>"."""
        return tuple(map(mask_name, self.windows or (None,) * self.num_layers))

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied embeddings count once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        dense = 3 * self.hidden_size * (self.intermediate_size or 0)
        block = attention + (dense if self.experts is None else self.experts.num_parameters(self.hidden_size)) + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * block + self.hidden_size

    @field_validator("rope_scaling", mode="before")
    @classmethod
    def _refuse_other_scalings(cls, value: object) -> object:
        kind = value.get("kind", "llama3") if isinstance(value, dict) else value
        if kind is None or kind == "llama3" or isinstance(value, Llama3RopeScaling):
            return value
        raise SpecError(f"rope_scaling {kind!r} is not supported", hint="use None or a Llama3RopeScaling")

    @field_validator("windows", mode="before")
    @classmethod
    def _read_full(cls, value: object) -> object:
        """Accept "full" for a layer without a window, since TOML has no None."""
        return (
            tuple(None if window == "full" else window for window in value)
            if isinstance(value, list | tuple)
            else value
        )

    @field_validator("head_dim", mode="after")
    @classmethod
    def _derive_head_dim(cls, value: int, info: ValidationInfo) -> int:
        if value or not {"hidden_size", "num_heads"} <= info.data.keys():
            return value
        hidden_size, num_heads = info.data["hidden_size"], info.data["num_heads"]
        if hidden_size % num_heads:
            raise SpecError(
                f"hidden_size {hidden_size} is not a multiple of {num_heads} heads",
                hint="change hidden_size or num_heads, or set head_dim",
            )
        return int(hidden_size // num_heads)

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if (self.intermediate_size is None) == (self.experts is None):
            raise SpecError(
                "neither intermediate_size nor experts is given"
                if self.experts is None
                else f"both intermediate_size {self.intermediate_size} and experts are given, "
                "but experts replace the feed-forward in every layer",
                hint="give intermediate_size for dense layers, or experts with its own intermediate_size",
            )
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise SpecError(
                f"{self.num_kv_heads} KV heads do not divide {self.num_heads} query heads",
                hint=f"set num_kv_heads to one of {divisors}",
            )
        if self.head_dim % 2:
            raise SpecError(
                f"head_dim {self.head_dim} is odd, but rotary embedding rotates pairs of dims",
                hint=f"set head_dim={self.head_dim + 1}, or choose hidden_size and num_heads with an even quotient",
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise SpecError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers",
                hint="give one entry per layer (None for full attention), or leave windows empty",
            )
        for layer, window in enumerate(self.windows):
            if window is not None and window < 1:
                raise SpecError(
                    f"window {window} of layer {layer} is below 1: a query would not see itself",
                    hint='use "full" (None in Python) for full attention',
                )
        return self
