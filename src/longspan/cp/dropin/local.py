"""Operators that would take one rank's tokens for the whole sequence: refused inside `context_parallel`.

    arange(T)                        positions start at 0 on every rank     kind "arange"
    table[:T], x[:, 1:], x[:, -1]    count rows from a rank's first or last kind "slice"
    cumsum over T tokens             starts anew on every rank              kind "cumsum"
    softmax of scores (T, T)         attention by hand                      kind "softmax"
    q @ k.mT, k.mT @ v               scores, or a state summed over T       kind "matmul"
    conv1d, lstm over T tokens       see no earlier rank                    kinds "conv", "recurrent"
    roll, flip of T tokens           stay on the rank                       kind "roll"

Operators carry no names of dims, so a dim counts as the tokens if its size is the number of tokens of any rank. All
ranks run one program, and so refuse at one operator.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from longspan.errors import SpecError

Tensor = torch.Tensor
Lengths = frozenset[int]

HF_WAY_OUT = 'call model.set_attn_implementation("longspan") and run the model by longspan.hf.sequence'
_HINTS = {
    "arange": "add the positions of the sequence, such as position_ids = torch.arange(S)[None], to buffers",
    "slice": "add the table, or the labels shifted on the global row, to buffers",
    "cumsum": "compute it on the global sequence and add the result to buffers",
    "softmax": "call torch.nn.functional.scaled_dot_product_attention",
    "matmul": "call torch.nn.functional.scaled_dot_product_attention",
    "conv": "run this layer outside context_parallel, on global tensors",
    "recurrent": "run this layer outside context_parallel, on global tensors",
    "roll": "reorder the global tensor before it is sharded",
}
KINDS = tuple(_HINTS)
_FREE = (
    "longspan.",
    "torch.distributed.",
    "torch.optim.",
    "torch.utils.data.",
    "torch._tensor_str",
    "transformers.integrations.moe",
    "transformers.masking_utils",
)
"""Modules that count rows without harm. Masks are checked where SDPA gets them, and experts work token by token."""

_PACKING = "find_packed_sequence_indices"
"""Function of transformers that finds documents in positions: those of a shard, whose ends are no ends of documents."""
_OF_THE_CHECK = ("longspan.cp.dropin.intercept", __name__)


@dataclass(frozen=True)
class Local:
    """An operator's way to take one rank's tokens for the sequence. `seen` has the operator's arguments after `lengths`."""

    kind: str
    does: str
    seen: Callable[..., bool]


@dataclass(frozen=True)
class LocalTokens:
    """The sequence of `seq_len` tokens, of which ranks hold `lengths`. Refuses operators, but not those of `allowed` kinds."""

    seq_len: int
    lengths: Lengths
    allowed: frozenset[str]

    @classmethod
    def of(cls, seq_len: int, lengths: Lengths, allowed: Iterable[str]) -> "LocalTokens":
        """Check the names of the `allowed` kinds."""
        allowed = frozenset([allowed] if isinstance(allowed, str) else allowed)
        if unknown := sorted(allowed.difference(KINDS)):
            raise SpecError(f"allow_local={unknown} is not known", hint=f"choose among {', '.join(KINDS)}")
        return cls(seq_len, lengths, allowed)

    def check(self, func: Any, local: Local, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `SpecError` if a call of `func` takes one rank's tokens for the sequence. Backward is not checked."""
        if not local.seen(self.lengths, *args, **kwargs) or torch._C._current_graph_task_id() != -1:
            return
        self.refuse(str(func).rsplit(".", 1)[0], local.kind, local.does)

    def refuse(self, name: str, kind: str, does: str) -> None:
        """Raise `SpecError` unless the kind is allowed, or the caller is longspan or known to be right."""
        caller = None if kind in self.allowed else _caller()
        if caller is None:
            return
        module = caller.f_globals.get("__name__", "?")
        place = f"{caller.f_code.co_qualname} ({module}, line {caller.f_lineno})"
        way_out = _HINTS[kind] + (f"; or {HF_WAY_OUT}" if module.startswith("transformers") else "")
        if caller.f_code.co_name == _PACKING:
            way_out = f"add an attention_mask of ones, (1, S), to buffers, and documents to mask=; or {HF_WAY_OUT}"
        raise SpecError(
            f"{name} in {place} {does} one rank's tokens, not the {self.seq_len} of the sequence",
            hint=f'{way_out}; or set allow_local=("{kind}",) if its dim is not the sequence',
        )


def local_use(name: str) -> Local | None:
    """Return how an operator, such as "aten.slice.Tensor", may take one rank's tokens for the sequence. None for most."""
    return _USES.get(name.rsplit(".", 1)[0])


def _caller() -> FrameType | None:
    """Return the frame that called the operator, outside torch; None if longspan or a module of `_FREE` called it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OF_THE_CHECK):
            if name.startswith(_FREE) and frame.f_code.co_name != _PACKING:
                return None
            if name != "torch" and not name.startswith("torch."):
                return frame
        frame = frame.f_back
    return None


def _arange(lengths: Lengths, *bounds: Any, **_: Any) -> bool:
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return step == 1 and end - start in lengths


def _linspace(lengths: Lengths, start: Any, end: Any, steps: int, **_: Any) -> bool:
    return steps in lengths


def _slice(
    lengths: Lengths, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> bool:
    """The first T rows of a longer table, T tokens without the first or the last one, or the last of T tokens."""
    size = x.shape[dim]
    first, stop, _ = slice(start, end).indices(size)
    if size in lengths:
        return stop - first == size - 1 or (start is not None and -size < start < 0)
    if first or stop not in lengths or step != 1:
        return False
    # A padded activation may be cut back to T tokens. Tables are integers, or leaves with the rows not in the last dim.
    is_table = x.is_leaf and torch.is_grad_enabled() and dim % x.ndim != x.ndim - 1
    return is_table or not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _select(lengths: Lengths, x: Tensor, dim: int, index: Any) -> bool:
    """The last of T tokens, counted from the end. An index from the front may be a batch row or an expert."""
    return x.shape[dim] in lengths and isinstance(index, int) and index < 0


def _pad(lengths: Lengths, x: Tensor, pad: list[int], value: Any = 0) -> bool:
    """A shift by one token: padding at one end, and a cut or, for integers such as labels, nothing at the other."""
    for index in range(len(pad) // 2):
        ends = pad[2 * index], pad[2 * index + 1]
        if x.shape[-1 - index] in lengths and (
            sum(ends) == 0 != ends[0] or (sorted(ends) == [0, 1] and not x.is_floating_point())
        ):
            return True
    return False


def _along(lengths: Lengths, x: Tensor, dim: int, *_: Any, **__: Any) -> bool:
    return x.ndim > 0 and x.shape[dim] in lengths


def _softmax(lengths: Lengths, x: Tensor, dim: int, *_: Any) -> bool:
    """Scores of T queries and T keys, possibly with a sink as one more key."""
    if x.ndim < 2 or not ((keys := x.shape[dim]) in lengths or keys - 1 in lengths):
        return False
    dim %= x.ndim
    return any(size in lengths for size in (*x.shape[:dim], *x.shape[dim + 1 :]))


def _bmm(lengths: Lengths, a: Tensor, b: Tensor) -> bool:
    """Scores `(T, D) @ (D, T)`, or a state `(D, T) @ (T, D)`; not products with weights."""
    (rows, inner), columns = a.shape[1:], b.shape[2]
    scores = rows in lengths and columns in lengths and inner > 1
    state = inner in lengths and rows not in lengths and min(rows, columns) > 1
    return (scores or state) and not (_is_weight(a) or _is_weight(b))


def _baddbmm(lengths: Lengths, _: Tensor, a: Tensor, b: Tensor, **__: Any) -> bool:
    return _bmm(lengths, a, b)


def _is_weight(x: Tensor) -> bool:
    return isinstance(x if x._base is None else x._base, torch.nn.Parameter)


def _convolution(
    lengths: Lengths, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, *_: Any
) -> bool:
    """T tokens in or out along a dim in which the kernel is longer than one token."""
    for index, kernel in enumerate(weight.shape[2:]):
        size = x.shape[2 + index]
        at = -1 if len(stride) == 1 else index
        reach = size + 2 * padding[at] - dilation[at] * (kernel - 1)
        if kernel > 1 and (size in lengths or reach in lengths):
            return True
    return False


def _roll(lengths: Lengths, x: Tensor, shifts: Any, dims: Any = ()) -> bool:
    return any(x.shape[dim] in lengths for dim in (dims or range(x.ndim)))


def _flip(lengths: Lengths, x: Tensor, dims: Any) -> bool:
    return any(x.shape[dim] in lengths for dim in dims)


_USES = {
    "aten.arange": Local("arange", "counts", _arange),
    "aten.linspace": Local("arange", "counts", _linspace),
    "aten.slice": Local("slice", "counts or shifts", _slice),
    "aten.select": Local("slice", "takes the last of", _select),
    "aten.constant_pad_nd": Local("slice", "shifts", _pad),
    "aten._softmax": Local("softmax", "attends to", _softmax),
    "aten.bmm": Local("matmul", "multiplies", _bmm),
    "aten.baddbmm": Local("matmul", "multiplies", _baddbmm),
    "aten.convolution": Local("conv", "convolves", _convolution),
    "aten.roll": Local("roll", "moves", _roll),
    "aten.flip": Local("roll", "moves", _flip),
    **{
        f"aten.{name}": Local("cumsum", "accumulates", _along)
        for name in ("cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "cummax", "cummin")
    },
}
