"""Replace `scaled_dot_product_attention` while a context is open, and refuse attention by other operators.

    Python, TorchScript, C++, exported programs  ->  SDPA operator      ->  replaced
    kernels by name, other packages              ->  other operators    ->  refused by a dispatch mode
    compiled code                                ->  runs eagerly, and so calls the SDPA operator
    operators that mix a rank's tokens           ->  `local`            ->  refused by the same mode
    recomputation in backward                    ->  SDPA operator, and a marker in case the context has ended

Only this file uses the dispatcher and its modes.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import signature
from threading import current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.library import _scoped_library, get_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from longspan.cp.dropin.local import Local, LocalTokens, local_use
from longspan.errors import SpecError
from longspan.kernels.own_calls import is_own_kernel

Tensor = torch.Tensor

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
_ATTENTION = re.compile(r"attention|attn|transformer_encoder|_safe_softmax")
"""Operators that compute attention. Only SDPA's math path calls `_safe_softmax`."""
_ALLOWED = re.compile(r"^longspan\b|backward|bwd")
"""Operators not refused: our own, and backward operators, since a graph from before the context may run backward inside."""
_OWN = "longspan"
"""Namespace of our own operators."""
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_open: list["_Kernels"] = []
"""Open contexts of all threads. Read only for a call outside a context, to find whether the call belongs to one."""


@contextmanager
def intercepted(attend: Callable[..., Tensor], slots: int, tokens: LocalTokens) -> Iterator["_Kernels"]:
    """Replace SDPA by `attend` in this thread and in backward passes started here. Other attention raises `SpecError`.

    So do operators that would take this rank's `tokens` for the sequence. Yields the mode, whose `num_own` counts the
    calls of longspan's operators.

    Threads started before are affected in one case: attention over exactly `slots` rows raises, since the call may
    belong to this context.
    """
    with (
        torch.compiler.set_stance("force_eager"),
        saved_tensors_hooks(_save, _saved),
        _scoped_library("aten", "IMPL") as library,
        _Kernels(attend, slots, tokens) as kernels,
        _Calls(tokens),
    ):
        for device in ("CPU", "CUDA"):
            library.impl(_SDPA, _attend, device)
            library.impl(_SDPA, _attend, f"Autograd{device}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Warning only once for all operators")  # that a kernel is overridden
            library.impl(_CPU_KERNEL, partial(_guarded, get_kernel(_CPU_KERNEL, "CPU")), "CPU", with_keyset=True)
        _open.append(kernels)
        try:
            yield kernels
        finally:
            _open.remove(kernels)


def is_intercepted() -> bool:
    """Whether a context is open in this thread."""
    return any(isinstance(mode, _Kernels) for mode in _get_current_dispatch_mode_stack())


def traced(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v, marked so that checkpointing raises if their SDPA is recomputed after the context has ended."""
    if torch.is_grad_enabled():
        return _Traced.apply(q, k, v)  # type: ignore[no-untyped-call]
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:  # runs under no_grad, which would not save the marker
            raise SpecError(
                "reentrant checkpointing recomputes attention in backward, when context_parallel may have ended",
                hint="set use_reentrant=False",
            )
        frame = frame.f_back  # type: ignore[assignment]
    return q, k, v


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Implement the SDPA operator while a context is open: `attend` in threads with a context, else plain SDPA."""
    modes = _get_current_dispatch_mode_stack()
    call = next((mode.attend for mode in modes if isinstance(mode, _Kernels)), None)
    if call is None:
        _check_elsewhere("scaled_dot_product_attention", query, key)
        call = _SDPA.decompose
    return call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _guarded(kernel: Any, keyset: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Guard SDPA's CPU kernel against calls unseen by modes: in operators, other threads and compiled code."""
    if not is_own_kernel():
        _check_elsewhere(str(_CPU_KERNEL), query, key)
    return kernel.call_boxed(keyset, query, key, *args, **kwargs)


def _check_elsewhere(name: str, query: Tensor, key: Tensor) -> None:
    """Refuse a call that may belong to another thread's context: a thread started inside, or `slots` rows."""
    rows = (query.shape[-2], key.shape[-2])
    for context in _open:
        if current_thread() not in context.other_threads or rows == (context.slots, context.slots):
            _refuse(
                f"{name} in a custom operator, or in another thread,",
                "call attention from the thread that opened the block, outside custom operators",
            )


class _Kernels(TorchDispatchMode):
    """Dispatch mode that refuses other attention operators, and holds the replacement for SDPA."""

    supports_higher_order_operators = True

    def __init__(self, attend: Callable[..., Tensor], slots: int, tokens: LocalTokens) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attend, self.slots, self.tokens, self.num_own = attend, slots, tokens, 0
        self.other_threads = {*enumerate_threads()} - {current_thread()}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:  # reaches the mode undecomposed in inference mode only
            return self.attend(*args, **kwargs or {})
        if (known := _known(func)) is not None:
            if isinstance(known, Local):
                self.tokens.check(func, known, args, kwargs or {})
            elif known != _OWN:
                _refuse(known, "call torch.nn.functional.scaled_dot_product_attention, or leave the block for it")
            else:
                self.num_own += 1
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload):
            with self:  # so that the mode sees the parts of an operator that other modes of execution decompose before
                if (out := func.decompose(*args, **kwargs or {})) is not NotImplemented:
                    return out
        return func(*args, **kwargs or {})


class _Calls(TorchFunctionMode):
    """Function mode that refuses functions by name whose operators are harder to recognise.

    These are `multi_head_attention_forward` with weights, which uses bmm and softmax, and recurrent layers.
    """

    def __init__(self, tokens: LocalTokens) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _MULTI_HEAD and signature(func).bind(*args, **kwargs or {}).arguments.get("need_weights", True):
            _refuse("multi_head_attention_forward with need_weights=True", "set need_weights=False")
        if func in _RECURRENT and any(size in self.tokens.lengths for size in args[0].shape[:-1]):
            self.tokens.refuse(f"torch.{func.__name__}", "recurrent", "runs over")
        return func(*args, **kwargs or {})


def _refuse(name: str, hint: str) -> None:
    raise SpecError(f"{name} was called inside context_parallel, where it would see only this rank's keys", hint=hint)


@lru_cache(maxsize=4096)
def _known(func: Callable[..., Any]) -> Local | str | None:
    """Return how an operator may mix a rank's tokens, its name if it computes attention or is higher-order, or `_OWN`."""
    name = str(func)
    if isinstance(func, HigherOrderOperator) or (_ATTENTION.search(name) and not _ALLOWED.search(name)):
        return name
    return _OWN if name.startswith(f"{_OWN}.") else local_use(name)


class _Traced(torch.autograd.Function):
    """Saves one tensor more than plain SDPA does, so that checkpointing raises if plain SDPA recomputes the call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q.new_empty(0, 83))
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return grads


def _save(x: Tensor) -> tuple[Tensor, int]:
    """Save a detached alias, because the end of the context restores the global data of a buffer itself."""
    return x.detach(), x._version


def _saved(saved: tuple[Tensor, int]) -> Tensor:
    x, version = saved
    if x._version != version:  # PyTorch does not check versions of tensors saved through hooks
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that backward needs has been modified by an inplace operation: "
            f"it is at version {x._version}, expected version {version}"
        )
    return x
