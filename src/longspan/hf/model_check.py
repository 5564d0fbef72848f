"""`hf.check`: whether a model is exact on a sharded sequence, found by running a small copy of it.

rules           dropout, devices, adapters                 read from the model's modules
small copy      the model's class and layers, small sizes  `shrink`
one row         f(x), f(x) again, f(x with one other token), f without position_ids
two shards      f(x[rows]) == f(x)[rows], loss shares that add up
seq_len tokens  f(x[rows]) == f(x)[rows] again: thresholds of length
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from longspan.errors import SpecError
from longspan.hf.adapters import check_adapters
from longspan.hf.probe import NO_INTERFACE, AttentionCall, Event, Found, Probe, Trace
from longspan.hf.shrink import VOCABULARY, shrink
from longspan.hf.wrappers import unwrapped
from longspan.names import IGNORED, ROUTER_LOSS
from longspan.plan import Layout

SHORT = 52
"""Tokens of the first runs: no size of a small model, so that a dimension of this size counts tokens."""
_RANKS = 2
_SPARED = 1e-4
"""Part of the tokens of a long row that may differ: routers in fp32 may choose another expert on a tie."""


@dataclass(frozen=True)
class Checked:
    """What the check of a model has seen: its attention calls in order, and the row lengths that were run."""

    calls: tuple[AttentionCall, ...]
    lengths: tuple[int, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of mask, in the order of their first call."""
        return tuple(dict.fromkeys(call.kind for call in self.calls))


_probes: dict[tuple[type, str], Checked] = {}
"""Class and configuration -> what their small copy has shown."""


def check(model: nn.Module, seq_len: int) -> Checked:
    """Check that a model of transformers is exact under context parallelism at `seq_len` tokens. Local: no collective.

    Only the model's class, configuration and modules are read, so that weights may be on `meta` or sharded. A small copy
    with the model's own layers runs on the CPU, once for a configuration and its longest row. Neither the model nor the
    state of random numbers changes.

    Raises `SpecError`, which names module, layer, cause and way out, for a model that
    - mixes tokens outside attention, selects keys by content, pools, or passes over the attention interface,
    - computes positions or rotary tables from the shard that it is given,
    - shifts labels itself or takes a mean over local targets,
    - has dropout and is in training mode, or lies on several devices,
    and for a model of which no small copy can be made.
    """
    base = unwrapped(model)
    check_adapters(base)
    if hasattr(base, "get_base_model"):  # an adapter of peft
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise SpecError(f"{type(base).__name__} is not a model of transformers", hint="give a PreTrainedModel")
    cls = next(c for c in type(base).__mro__ if not issubclass(c, FSDPModule))

    key = cls, base.config.to_json_string()
    try:
        _check_devices(base)
        _check_dropout(model)
        _check_router_loss(base, cls)
        if key not in _probes or max(_probes[key].lengths) < seq_len:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                _probes[key] = _probed_again(cls, base.config, seq_len)
    except Found as found:
        raise SpecError(_text(cls, base, found), hint=found.hint) from found.__cause__
    return _probes[key]


def _probed_again(cls: type, config: Any, seq_len: int) -> Checked:
    """Probe, and if values differ once more: a tie of two experts may go either way, what is wrong is so with other weights."""
    try:
        return _probed(cls, config, seq_len, seed=0)
    except Found as found:
        if not found.measured:
            raise
        return _probed(cls, config, seq_len, seed=1)


def _text(cls: type, model: nn.Module, found: Found) -> str:
    layer = next((f"layer {part}, " for part in found.where.split(".") if part.isdigit()), "")
    named = dict(model.named_modules())
    module = f" ({type(named[found.where]).__name__})" if found.where in named else ""
    place = f"{layer}{found.where}{module}" if found.where else "the model as a whole"
    return f"{cls.__name__} cannot be trained on a sharded sequence: {place} {found.cause}"


def _check_devices(model: Any) -> None:
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise Found(
            "",
            f"lies on devices {', '.join(devices)} (hf_device_map); a rank has one device",
            "load the model without device_map, and shard weights by FSDP2",
        )


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules() if model.training else ():
        if getattr(module, "neftune_noise_alpha", None):
            raise Found(
                name, "adds noise scaled by the number of tokens of the shard (NEFTune)", "set no neftune_noise_alpha"
            )
        rates = {k: v for k, v in vars(module).items() if "drop" in k and isinstance(v, float) and v > 0}
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            rates["p"] = module.p
        for key, rate in rates.items():
            raise Found(
                name,
                f"has dropout {key}={rate}: its random numbers depend on the shards",
                "set every dropout of the configuration to 0.0 before the model is built",
            )


def _check_router_loss(model: Any, cls: type) -> None:
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False) and not hasattr(sys.modules[cls.__module__], ROUTER_LOSS):
        raise Found(
            "",
            "adds a router loss (output_router_logits=True) of its own over local tokens",
            "set output_router_logits=False",
        )


def _probed(cls: type, config: Any, seq_len: int, seed: int) -> Checked:
    torch.manual_seed(seed)
    tokens = _tokens(max(seq_len, SHORT))
    try:
        small = shrink(cls, config, tokens[:, :SHORT])
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise Found(
            "",
            f"could not be probed: no small copy of it runs ({type(error).__name__}: {first})",
            "compare its loss and gradients on one rank and on two yourself, by longspan.verify",
        ) from error
    small.config.get_text_config().output_router_logits = False
    with Probe(small) as probe:
        short = _Check(small, probe, tokens[:, :SHORT])
        whole = short.run_row()
        short.run_shards(whole)
        short.run_loss(whole)
        if seq_len > SHORT:
            long = _Check(small, probe, tokens[:, :seq_len])
            long.run_shards(long.run_whole())
    return Checked(tuple(whole.calls), (SHORT, seq_len) if seq_len > SHORT else (SHORT,))


def _tokens(length: int) -> Tensor:
    """Tokens that mean nothing to a model: small numbers and the largest ones are padding, ends, images."""
    return torch.randint(8, VOCABULARY - 8, (1, length))


class _Check:
    """The runs of a small model on one row of tokens."""

    def __init__(self, model: nn.Module, probe: Probe, tokens: Tensor) -> None:
        self.model, self.probe, self.tokens = model, probe, tokens
        self.arguments = inspect.signature(model.forward).parameters
        self.length = tokens.shape[1]
        self.positions = torch.arange(self.length)[None] if "position_ids" in self.arguments else None
        layout, rows = Layout.zigzag(self.length, _RANKS), torch.arange(self.length)
        self.shards = [torch.as_tensor(layout.positions(rank)) for rank in range(_RANKS)]
        few = min(SHORT, self.length // 4)
        self.parts = [*self.shards, rows[:few], rows[-few:]]
        """Rows that must come out alike: the shards, and few tokens from either end, as with more ranks."""

    def run_whole(self) -> Trace:
        return self.probe.run(self.tokens, self.positions)

    def run_row(self) -> Trace:
        whole = self.run_whole()
        everywhere = torch.arange(self.length)
        if event := whole.first_difference(self.run_whole(), everywhere, tolerance=0.0):
            raise Found(
                self._culprit(event), "gives other values to the same tokens: it draws random numbers", _NO_NOISE
            )
        place = self.length // 3
        other = self.tokens.clone()
        other[0, place] = 8 + (other[0, place] - 7) % (VOCABULARY - 16)
        self.changed = self.probe.run(other, self.positions)
        self.others = everywhere[everywhere != place]
        if event := self._mixing(whole):
            cause, hint = _MIXES if whole.calls else NO_INTERFACE
            raise Found(self._culprit(event), cause, hint)
        if not whole.calls:
            raise Found("", *NO_INTERFACE)
        self._check_output(whole)
        if self.positions is not None and (event := self._moved(whole, everywhere)):
            raise Found(self._culprit(event), *_OWN_POSITIONS)
        return whole

    def _mixing(self, whole: Trace) -> Event | None:
        rows = {event.key: event for event in self.changed.events}
        return whole.first_difference(
            Trace([Event(e.module, e.step, e.nth, e.values[self.others]) for e in rows.values()]), self.others
        )

    def _moved(self, whole: Trace, everywhere: Tensor) -> Event | None:
        """The first difference when the model makes its positions itself."""
        plain = self.probe.run(self.tokens, None)
        return whole.first_difference(plain, everywhere, steps=("attention", "out"))

    def run_shards(self, whole: Trace) -> None:
        spared = int(_SPARED * self.length)
        for rows in self.parts:
            positions = None if self.positions is None else self.positions[:, rows]
            part = self.probe.run(self.tokens[:, rows], positions)
            if event := whole.first_difference(part, rows, spared=spared):
                raise Found(
                    self._culprit(event), *(_POSITIONS if self.positions is not None else _NO_POSITIONS), measured=True
                )

    def _check_output(self, whole: Trace) -> None:
        output = whole.output
        per_token = output.get("logits", output.get("last_hidden_state")) if hasattr(output, "get") else output[0]
        if not isinstance(per_token, Tensor) or per_token.shape[:2] != self.tokens.shape:
            raise Found("", *_POOLS)

    def run_loss(self, whole: Trace) -> None:
        """Compare the loss of the row with the sum of the shards' shares."""
        if "labels" not in self.arguments:
            return
        targets = self.tokens.roll(-1, 1).clone()
        targets[0, -1] = IGNORED
        targets[0, ::5] = IGNORED
        count = (targets != IGNORED).sum()

        def loss(rows: Tensor) -> float:
            positions = None if self.positions is None else self.positions[:, rows]
            local = targets[:, rows]
            named = {"labels": local, "shift_labels": local, "num_items_in_batch": count}
            return float(self.probe.run(self.tokens[:, rows], positions, **named).output["loss"])

        row, shares = loss(torch.arange(self.length)), [loss(rows) for rows in self.shards]
        if abs(sum(shares) - row) > 1e-5 * abs(row):
            raise Found("", *_LOSS)

    def _culprit(self, event: Event) -> str:
        """The module in which the difference came about: inputs that differ were made by the module around."""
        return event.module.rpartition(".")[0] if event.step == "in" else event.module


_ONLY_ATTENTION = "train it with cp=1, or take a model whose tokens meet in attention alone"
_MIXES = ("mixes tokens outside attention", _ONLY_ATTENTION)
_NO_NOISE = "set noise and dropout of the configuration to 0.0"
_POSITIONS = (
    "computes positions, rotary tables or scales from the shard that it is given, not from position_ids alone",
    "take rope_type 'default', 'linear', 'llama3' or 'yarn'; or a seq_len below the length at which it changes",
)
_NO_POSITIONS = (
    "counts positions from the start of the shard that it is given: the model takes no position_ids",
    "train it with cp=1, or take a model that takes position_ids",
)
_OWN_POSITIONS = (
    "gives tokens other positions than 0, 1, 2, ... when position_ids are left out",
    "train it with cp=1: its positions are not those of longspan's position_ids",
)
_POOLS = (
    "has no logits for each token: its head pools the tokens that it is given",
    "take the causal language model, or the model without a head, and pool seq.unshard(hidden states)",
)
_LOSS = (
    "computes a loss whose shares do not add up: it shifts labels itself or takes the mean over local targets",
    "compute the loss from out.logits and shifted labels yourself, divided by the targets of the whole batch",
)
