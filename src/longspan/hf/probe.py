"""What a small model does with a row of tokens and with a part of the row, module by module.

    with Probe(model) as probe:
        whole = probe.run(tokens, positions)                   # a `Trace`
        part = probe.run(tokens[:, rows], positions[:, rows])
        whole.first_difference(part, rows)                     # the first place where `part` is not the rows of `whole`

Attention is replaced by a function of each token's own query, key and value: `v * sigmoid(q a + k b)`. What is left must
give every token the same values in the part as in the row. Each entry and exit of a module is an event; of every tensor
with one row per token, an event keeps one number per token, a fixed random projection.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.hf.keywords import KNOWN_KEYWORDS
from longspan.hf.mask_kinds import OVERLAY, kind_of

_KEY = "longspan_probe"


class Found(Exception):  # noqa: N818
    """A reason against context parallelism: where in the model, the cause, and a way out."""

    def __init__(self, where: str, cause: str, hint: str, measured: bool = False) -> None:
        """`measured`: by values that differ, which other weights should confirm."""
        super().__init__(where, cause, hint)
        self.where, self.cause, self.hint, self.measured = where, cause, hint, measured


@dataclass(frozen=True)
class AttentionCall:
    """A call of the attention function: module, kind of mask, query heads and KV heads."""

    module: str
    kind: str
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class Event:
    """An entry ("in"), attention call ("attention") or exit ("out") of the `nth` run of a module, and a number per token."""

    module: str
    step: str
    nth: int
    values: Tensor

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.step, self.nth


@dataclass
class Trace:
    """The events and attention calls of one forward of the model, and what it returned."""

    events: list[Event] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    output: Any = None

    def first_difference(
        self,
        part: "Trace",
        rows: Tensor,
        tolerance: float = 1e-5,
        spared: int = 0,
        steps: tuple[str, ...] = ("in", "attention", "out"),
    ) -> Event | None:
        """Return the first event whose values in `part` are not the `rows` of its values here, at more than `spared` tokens."""
        others = {event.key: event.values for event in part.events if event.step in steps}
        for event in self.events:
            other = others.get(event.key)
            if other is None or len(other) != len(rows):
                continue
            mine = event.values[rows]
            scale = float(event.values.abs().max()) or 1.0
            if int((~((mine - other).abs() <= tolerance * scale)).sum()) > spared:
                return event
        return None


class Probe:
    """Runs copies of a model, with attention replaced and hooks in place, inside a `with` block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names: dict[nn.Module, str] = {}
        self._within: list[str] = []
        self._trace = Trace()
        self._runs: Counter[tuple[str, str]] = Counter()
        self._length = 0
        self._masked = True

    def __enter__(self) -> "Probe":
        AttentionInterface.register(_KEY, self._attend)
        AttentionMaskInterface.register(_KEY, self._mask)
        return self

    def __exit__(self, *_: object) -> None:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_KEY, None)

    def _hooked(self) -> nn.Module:
        """A copy of the model: a run may leave state behind, as rotary tables that grow do."""
        model = copy.deepcopy(self.model)
        self._names = {module: name for name, module in model.named_modules()}
        for module in self._names:
            if hasattr(config := getattr(module, "config", None), "_attn_implementation"):
                config._attn_implementation_internal = _KEY  # type: ignore[union-attr]
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)
        return model

    @torch.no_grad()
    def run(self, tokens: Tensor, positions: Tensor | None, **others: Any) -> Trace:
        """Call the model as `model(**seq.inputs)` does. Raises `Found`."""
        self._trace, self._within, self._length = Trace(), [], tokens.shape[1]
        self._runs.clear()
        if positions is not None:
            others["position_ids"] = positions
        model = self._hooked()
        try:
            self._trace.output = model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **others
            )
        except Found:
            raise
        except _MaskReadError:
            where, calls = self._where(), len(self._trace.calls)
            if self._masked and not calls:
                calls = self._calls_with_dense_mask(tokens, positions, others)
            raise Found(where, *(READS_MASK if calls else NO_INTERFACE)) from None
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            raise Found(self._where(), f"raised {type(error).__name__}: {text[0]}", _REPORT) from error
        return self._trace

    def _calls_with_dense_mask(self, tokens: Tensor, positions: Tensor | None, others: dict[str, Any]) -> int:
        """How often the model calls the attention function if the mask is a tensor. Raises what is `Found` then."""
        self._masked = False
        try:
            return len(self.run(tokens, positions, **others).calls)
        except Found as found:
            if found.cause.startswith("raised"):
                return len(self._trace.calls)
            raise
        finally:
            self._masked = True

    def _where(self) -> str:
        return self._within[-1] if self._within else ""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._within.append(self._names[module])
        self._add("in", [*args, *kwargs.values()])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._add("out", output)
        self._within.pop()

    def _add(self, step: str, values: Any) -> None:
        where = self._where()
        numbers = [y for x in _tensors(values) if (y := _per_token(x, self._length)) is not None]
        nth = self._runs[where, step]
        self._runs[where, step] += 1
        if numbers:
            self._trace.events.append(Event(where, step, nth, torch.stack(numbers).sum(0)))

    def _mask(self, **call: Any) -> "_MaskStandIn | Tensor":
        return _MaskStandIn(kind_of(**call)) if self._masked else torch.zeros(1, 1, self._length, self._length)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        where = self._names[module]
        if unknown := sorted(name for name, x in others.items() if x is not None and name not in KNOWN_KEYWORDS):
            raise Found(where, f"passes {', '.join(unknown)} to attention: {_SELECTS}", _OTHER_MODEL)
        if dropout:
            raise Found(where, f"has attention dropout {dropout}", "set attention_dropout=0.0 in the configuration")
        if key.shape[2] != query.shape[2] or query.shape[2] != self._length:
            raise Found(
                where,
                f"attends with {query.shape[2]} queries over {key.shape[2]} keys where the row has {self._length} tokens",
                _OTHER_MODEL,
            )
        if not self._masked:
            attention_mask = _MaskStandIn("unknown")
        if not isinstance(attention_mask, _MaskStandIn):
            made = "no mask" if attention_mask is None else "a mask that it made itself"
            raise Found(where, f"calls attention with {made}, not with that of the mask interface", _OTHER_MODEL)
        if attention_mask.kind == OVERLAY:
            raise Found(where, "lays a mask of its own over causal attention", _OTHER_MODEL)
        H, K = query.shape[1], key.shape[1]
        self._trace.calls.append(AttentionCall(where, attention_mask.kind, H, K))
        self._add("attention", [query, key, value])
        gate = _project(query) + _project(key).repeat_interleave(H // K, 1)
        out = value.repeat_interleave(H // K, 1) * gate.sigmoid().unsqueeze(-1)
        return out.transpose(1, 2).contiguous(), None


class _MaskReadError(AttributeError):
    pass


class _MaskStandIn:
    """What the mask function returns: it carries a kind of mask, and raises if the model computes with it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise _MaskReadError

    def _read(self, *_: Any, **__: Any) -> Any:
        raise _MaskReadError

    __getitem__ = __getattr__ = __add__ = __mul__ = __sub__ = __eq__ = __lt__ = __gt__ = __invert__ = __and__ = _read
    __hash__ = object.__hash__


def _project(x: Tensor) -> Tensor:
    return x @ _weights(x.shape[-1], x.dtype)


def _per_token(x: Tensor, length: int) -> Tensor | None:
    """One number for each of `length` tokens, or None for a tensor that has no row per token."""
    if x.ndim >= 2 and x.shape[0] == 1 and x.shape[1] == length:
        rows = x[0]
    elif x.ndim == 4 and x.shape[0] == 1 and x.shape[2] == length:
        rows = x[0].transpose(0, 1)
    elif x.ndim >= 1 and x.shape[0] == length:
        rows = x
    else:
        return None
    rows = rows.reshape(length, -1)
    return _project(torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows.float())


def _weights(n: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return (torch.randn(n, generator=generator, dtype=torch.float64) / max(n, 1) ** 0.5).to(dtype)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _tensors(value)


_SELECTS = "it may select keys by content or change scores"
_ONLY_ATTENTION = "train it with cp=1, or take a model whose tokens meet in attention alone"
_OTHER_MODEL = "no setting of longspan makes this model exact on a sharded sequence: train it with cp=1"
_REPORT = "run the model with attn_implementation='longspan' on one rank to see the whole error"
READS_MASK = ("computes with the attention mask itself", _OTHER_MODEL)
NO_INTERFACE = (
    "mixes tokens without calling the attention function of transformers' AttentionInterface, which longspan replaces",
    _ONLY_ATTENTION,
)
