"""Takes over `scaled_dot_product_attention` while a context is open, and finds what would get round it.

    Python, TorchScript, C++, exported programs  ->  the operator SDPA  ->  (taken over here)
    kernels by name, other packages              ->  other operators    ->  refused, seen by a mode over all operators
    compiled code                                ->  runs eagerly, and so calls the operator SDPA
    recomputation in backward                    ->  the operator SDPA, and a trace in case the context has ended

This is the only file that touches the dispatcher and its modes.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from inspect import signature
from threading import current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.library import _scoped_library, get_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction

from longspan.errors import SpecError
from longspan.kernels.own_calls import is_own_kernel

Tensor = torch.Tensor

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
_ATTENTION = re.compile(r"attention|attn|transformer_encoder|_safe_softmax")
"""Operators that compute attention; the last is met where SDPA takes plain math, and nowhere else."""
_ALLOWED = re.compile(r"^longspan\b|backward|bwd")
"""Ours; and gradients of what ran before the context, which may be wanted inside."""
_open: list["_Kernels"] = []
"""The contexts of all threads; looked at only to tell whether a call that found none should have had one."""


@contextmanager
def intercepted(attend: Callable[..., Tensor], slots: int) -> Iterator[None]:
    """Inside, in this thread and the backward passes it starts, `attend` is SDPA, and other attention raises `SpecError`.

    Threads of other work go on as ever, but for attention over as many rows as this rank has `slots`: these may be ours.
    """
    with (
        torch.compiler.set_stance("force_eager"),
        saved_tensors_hooks(_save, _saved),
        _scoped_library("aten", "IMPL") as library,
        _Kernels(attend, slots) as kernels,
        _Calls(),
    ):
        for device in ("CPU", "CUDA"):
            library.impl(_SDPA, _attend, device)
            library.impl(_SDPA, _attend, f"Autograd{device}")
        library.impl(_CPU_KERNEL, partial(_guarded, get_kernel(_CPU_KERNEL, "CPU")), "CPU", with_keyset=True)
        _open.append(kernels)
        try:
            yield
        finally:
            _open.remove(kernels)


def is_intercepted() -> bool:
    """Whether a context is open in this thread."""
    return any(isinstance(mode, _Kernels) for mode in _get_current_dispatch_mode_stack())


def traced(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as they are, so that checkpointing which computes SDPA of them again after the context says that it cannot."""
    if torch.is_grad_enabled():
        return _Traced.apply(q, k, v)  # type: ignore[no-untyped-call]
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:  # it leaves no trace, and would compute with local keys
            raise SpecError(
                "reentrant checkpointing calls attention again in backward, when context_parallel may have ended",
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
    """What the operator SDPA does in this process while a context is open; in threads of other work, what it always does."""
    modes = _get_current_dispatch_mode_stack()
    call = next((mode.attend for mode in modes if isinstance(mode, _Kernels)), None)
    if call is None:
        _check_elsewhere("scaled_dot_product_attention", query, key)
        call = _SDPA.decompose
    return call(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _guarded(kernel: Any, keyset: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel that SDPA ends in on CPU, where modes do not see it: in operators, other threads and compiled code."""
    if not is_own_kernel():
        _check_elsewhere(str(_CPU_KERNEL), query, key)
    return kernel.call_boxed(keyset, query, key, *args, **kwargs)


def _check_elsewhere(name: str, query: Tensor, key: Tensor) -> None:
    """Refuse a call without a context that may belong to one: of a thread started inside, or of as many rows and keys."""
    rows = (query.shape[-2], key.shape[-2])
    for context in _open:
        if current_thread() not in context.other_threads or rows == (context.slots, context.slots):
            _refuse(
                f"{name} of an operator of your own, or of another thread,",
                "call it from the thread and the program that opened the block",
            )


class _Kernels(TorchDispatchMode):
    """Sees every operator that computes, and carries what SDPA is now to where it is called."""

    supports_higher_order_operators = True

    def __init__(self, attend: Callable[..., Tensor], slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attend, self.slots = attend, slots
        self.other_threads = {*enumerate_threads()} - {current_thread()}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:  # it comes whole where nothing is recorded for backward: in inference mode
            return self.attend(*args, **kwargs or {})
        if (name := _hidden_attention(func)) is not None:
            _refuse(name, "call torch.nn.functional.scaled_dot_product_attention, or leave the block for it")
        return func(*args, **kwargs or {})


class _Calls(TorchFunctionMode):
    """Sees functions of PyTorch, of which one computes attention by products and a softmax of its own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _MULTI_HEAD and signature(func).bind(*args, **kwargs or {}).arguments.get("need_weights", True):
            _refuse("multi_head_attention_forward with need_weights=True", "set need_weights=False")
        return func(*args, **kwargs or {})


def _refuse(name: str, hint: str) -> None:
    raise SpecError(f"{name} was reached inside context_parallel, where it would see this rank's keys alone", hint=hint)


@lru_cache(maxsize=4096)
def _hidden_attention(func: Callable[..., Any]) -> str | None:
    """The name of an operator that computes attention and is not ours, or calls functions that may; else None."""
    name = str(func)
    if isinstance(func, HigherOrderOperator) or (_ATTENTION.search(name) and not _ALLOWED.search(name)):
        return name
    return None


class _Traced(torch.autograd.Function):
    """Saves what SDPA does not: checkpointing that computes again, by SDPA as it then is, misses this tensor and says so."""

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
    """What backward needs, by a name of its own: that of a buffer goes back to the global tensor when the context ends."""
    return x.detach(), x._version


def _saved(saved: tuple[Tensor, int]) -> Tensor:
    x, version = saved
    if x._version != version:  # PyTorch leaves this to the hooks where there are any
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that backward needs has been modified by an inplace operation: "
            f"it is at version {x._version}, expected version {version}"
        )
    return x
