"""Local attention for peers whose own kernel needs CUDA: PyTorch's CPU flash operator, and flash-attn's functions over it.

A window is computed for 128 query rows at a time, as in longspan's own CPU kernel, so that kernels do not favour longspan.
Tensors are `(B, H, S, D)` unless stated otherwise.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.peers.cases import Case

Tensor = torch.Tensor
Local = Callable[[Tensor, Tensor, Tensor], Tensor]
aten = torch.ops.aten

ROWS = 128


def local_attention(case: Case) -> Local:
    """Return attention of unsharded sequences over any number of heads, as fast as the CPU flash operator allows."""
    match case.kind:
        case "causal":
            return _causal
        case "packed":
            return lambda q, k, v: _documents(q, k, v, case.lengths)
        case "window":
            assert case.window is not None
            left = case.window - 1
            return lambda q, k, v: Flash.apply(q, k, v, True, left, 0, None)


def plain_attention(case: Case) -> Local:
    """Return attention with plain PyTorch in one process: `local_attention`, but with a boolean mask for a window."""
    if case.kind != "window":
        return local_attention(case)
    visible = torch.from_numpy(case.mask.dense())
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _documents(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([_causal(*part) for part in parts], dim=2)


class Flash(torch.autograd.Function):
    """Flash attention with flash-attn's causal flag and window, flag and window aligned to the bottom right."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int, scale: float | None):
        out, lse = flash_forward(q, k, v, causal, left, right, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shape = (causal, left, right, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor):
        return *flash_backward(dout, *ctx.saved_tensors, *ctx.shape), None, None, None, None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int, right: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and logsumexp `(B, H, S)`. `left` and `right` are flash-attn's window sizes, -1 for unbounded."""
    if left < 0 and right < 0:
        assert not causal or q.shape[2] == k.shape[2], "the operator aligns causal to the top left"
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, keys, mask in _blocks(q.shape[2], k.shape[2], causal, left, right, q.dtype):
        out[:, :, rows], lse[:, :, rows] = aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=scale
        )
    return out, lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, left: int, right: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v."""
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if left < 0 and right < 0:
        return op(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys, mask in _blocks(q.shape[2], k.shape[2], causal, left, right, q.dtype):
        part = [x[:, :, rows] for x in (dout, q)] + [x[:, :, keys] for x in (k, v)] + [out[:, :, rows]]
        dq[:, :, rows], dk_part, dv_part = op(
            *part, lse[:, :, rows].contiguous(), 0.0, False, attn_mask=mask, scale=scale
        )
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return dq, dk, dv


def _blocks(
    num_q: int, num_k: int, causal: bool, left: int, right: int, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (contiguous range of query rows, visible keys, additive mask), without rows that see no key."""
    left = num_q + num_k if left < 0 else left
    right = 0 if causal else num_q + num_k if right < 0 else right
    offset = num_k - num_q
    first, last = max(0, -offset - right), min(num_q, num_k - offset + left)
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        key_start, key_stop = max(0, start + offset - left), min(num_k, stop + offset + right)
        shape = (stop - start, key_stop - key_start, start + offset - key_start)
        yield slice(start, stop), slice(key_start, key_stop), _additive_mask(*shape, left, right, dtype)


@lru_cache(maxsize=16)
def _additive_mask(rows: int, keys: int, ahead: int, left: int, right: int, dtype: torch.dtype) -> Tensor:
    away = torch.arange(rows)[:, None] + ahead - torch.arange(keys)
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_((away > left) | (away < -right), float("-inf"))


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Let `import flash_attn` find a stand-in over the CPU operator inside the block. Its tensors are `(B, S, H, D)`.

    The stand-in has only the functions that yunchang calls, and is removed after the block, so that no other package uses it.
    """
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
    package.__version__ = "2.8.3"
    package.flash_attn_func = _flash_attn_func
    package.flash_attn_interface = interface
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = None
    sys.modules.update({module.__name__: module for module in (package, interface)})
    try:
        yield
    finally:
        for module in (package, interface):
            del sys.modules[module.__name__]


def _swap(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **rest):
    _check_unused(dropout_p, rest)
    return Flash.apply(*_swap(q, k, v), causal, *window_size, softmax_scale).transpose(1, 2)


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap=0.0, alibi_slopes=None,
    return_softmax=False,
):  # fmt: skip
    _check_unused(dropout_p, {"softcap": softcap, "alibi_slopes": alibi_slopes, "return_softmax": return_softmax})
    out, lse = flash_forward(*_swap(q, k, v), causal, window_size_left, window_size_right, softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _check_unused(dropout_p, {"softcap": softcap, "alibi_slopes": alibi_slopes})
    grads = flash_backward(
        *_swap(dout, q, k, v, out), softmax_lse.contiguous(), causal, window_size_left, window_size_right, softmax_scale
    )
    for buffer, grad in zip((dq, dk, dv), grads, strict=True):
        buffer.copy_(grad.transpose(1, 2))


def _check_unused(dropout_p: float, rest: dict[str, Any]) -> None:
    asked = {name: value for name, value in {"dropout_p": dropout_p, **rest}.items() if value}
    assert not asked, f"the stand-in does not support {asked}"
