"""Adapters of peft: what is computed token by token is exact on a shard; the rest is refused, by name.

peft itself is not imported: a model with adapters holds `peft_config`, adapter name -> configuration.
"""

from collections.abc import Mapping
from typing import Any

from longspan.errors import SpecError

_METHODS = {
    "ADAPTION_PROMPT": "computes an attention of its own beside that of each layer",
    "LILY": "weighs its experts by a mean over the tokens that it is given",
    "PVERA": "draws noise for the tokens that it is given",
    "SHADOW": "runs a second model over the tokens that it is given",
}
"""peft_type -> why its result on a shard differs from that on the whole row."""


def check_adapters(model: Any) -> None:
    """Raise `SpecError` for an adapter whose result depends on more than one token, or in training on a dropout mask."""
    adapters = getattr(model, "peft_config", None)
    for name, config in adapters.items() if isinstance(adapters, Mapping) else ():
        method = getattr(config.peft_type, "value", config.peft_type)
        reason = _reason(method, config)
        if reason is not None:
            raise SpecError(
                f"adapter {name!r} of {type(model).__name__} is of {method}, which {reason}",
                hint="use LoRA or another adapter of linear layers, or train this adapter without context parallelism",
            )
        for field, rate in vars(config).items():
            if model.training and "dropout" in field and isinstance(rate, float) and rate:
                raise SpecError(
                    f"adapter {name!r} of {type(model).__name__} has {field}={rate}: "
                    "its masks on this rank's tokens would be other ones than on the whole row",
                    hint=f"set {field}=0.0 in the adapter's configuration; model.eval() leaves dropout out",
                )


def _reason(method: str, config: Any) -> str | None:
    if getattr(config, "is_prompt_learning", False):
        return "puts learned tokens before the tokens that it is given: one prompt on every rank instead of one a row"
    if getattr(config, "alora_invocation_tokens", None):
        return "begins at its invocation tokens (aLoRA), and looks for them among the tokens that it is given"
    return _METHODS.get(method)
