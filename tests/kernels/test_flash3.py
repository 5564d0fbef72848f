"""FlashAttention-3 through a stand-in with the signatures of torch's adapter and the window rules of its flash_api.cpp."""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from torch.nn.attention import _fa3, current_flash_attention_impl

from longspan.kernels import flash3
from longspan.kernels.choice import KERNELS
from longspan.kernels.flash3 import FlashAttention3Kernel
from longspan.kernels.scores import ScoreChange
from longspan.kernels.windows import window_of
from tests.cp.cases import check_through, through
from tests.examples import examples

from .test_sdpa import CUDA, FOLLOWING, FlashOnCuda, check_joined, join_tiles, some_tiles, tensors
from .tiles import HEADS, PRECISION, TILES, check_kernel, seen, wide

KERNEL = FlashAttention3Kernel()
SIGNATURES = [
    inspect.signature(adapter)
    for adapter in (_fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl)
]


class FlashOnHopper(FlashOnCuda):
    """As FlashAttention-2, but for the window: a side that reaches every key is open, and an open side is no limit."""

    def _bind(self, name, positional, named):
        bound = SIGNATURES["backward" in name].bind(*positional, **named)
        bound.apply_defaults()
        for side in ("window_size_left", "window_size_right"):
            bound.arguments[side] = None if bound.arguments[side] == -1 else bound.arguments[side]
        bound.arguments.setdefault("return_debug_mask", False)
        made = SimpleNamespace(**bound.arguments)
        self.calls.append((name, made))
        return made

    def _math(self, a):
        rows, columns = a.query.shape[1], a.key.shape[1]
        most_q, most_k = getattr(a, "most", (rows, columns))
        left = columns if a.window_size_left is None or a.window_size_left >= most_k - 1 else a.window_size_left
        right = rows if a.window_size_right is None or a.window_size_right >= most_q - 1 else a.window_size_right
        j = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
        group = a.query.shape[2] // a.key.shape[2]
        q, k, v = (wide(x.transpose(1, 2)) for x in (a.query, a.key, a.value))
        scores = q @ k.repeat_interleave(group, 1).mT * a.scale
        scores = scores.masked_fill((j < -left) | (j > right), float("-inf"))
        lse = scores.logsumexp(-1)
        return (torch.exp(scores - lse[..., None]) @ v.repeat_interleave(group, 1)).transpose(1, 2), lse, scores

    def _sequences(self, a):
        for one in super()._sequences(a):
            one.most = a.max_q, a.max_k
            yield one


class OnThisMachine(FlashAttention3Kernel):
    """The kernel on tensors of this machine, in fp64 too."""

    def refusal(self, q, k, v, change=None):
        return None


def operators(stand_in):
    return lambda: (stand_in._flash_attention_forward, stand_in._flash_attention_backward)


@contextmanager
def on_this_machine():
    """The kernel through the stand-in, in the place of the real one."""
    with patch.object(flash3, "_operators", operators(FlashOnHopper())), patch.dict(KERNELS, flash3=OnThisMachine()):
        yield


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(flash3, "_operators", operators(stand_in := FlashOnHopper()))
    return stand_in


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", TILES)
def test_every_tile(flash, kind, heads):
    check_kernel(KERNEL, TILES[kind], heads, torch.bfloat16, PRECISION[torch.bfloat16])
    assert len({name for name, _ in flash.calls}) == 2


@through
def test_the_oracle_matrix(P, routes, every_layout):
    check_through(on_this_machine, "flash3", P, routes, every_layout)


@examples(100)
@given(some_tiles())
def test_the_window_shows_exactly_the_tiles_pairs(tile):
    stand_in = FlashOnHopper()
    for part in KERNEL.split(tile, CUDA, torch.bfloat16):
        left, right = window_of(part.shape)
        q, k = torch.zeros(1, part.shape.num_q, 1, 8), torch.zeros(1, part.shape.num_k, 1, 8)
        call = SimpleNamespace(query=q, key=k, value=k, scale=1.0, window_size_left=left, window_size_right=right)
        assert torch.equal(stand_in._math(call)[2][0, 0] == 0, seen(part))


@pytest.mark.parametrize("kind", FOLLOWING)
def test_tiles_that_follow_each_other_go_together(flash, kind):
    check_joined(KERNEL, join_tiles(kind), FOLLOWING[kind][2], (4, 2), torch.bfloat16, PRECISION[torch.bfloat16][1])
    assert any(call.cum_seq_q is not None for _, call in flash.calls)


def test_the_real_adapter_is_called_and_the_programs_own_attention_is_left_alone():
    assert flash3._operators() == (
        _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl,
    )  # fmt: skip
    flash3._missing.cache_clear()
    with patch.object(flash3, "find_spec", lambda name: name), patch.object(_fa3, "_fa3_import_module") as loaded:
        assert flash3._missing() is None
    loaded.assert_called_once_with("flash_attn_interface")
    assert current_flash_attention_impl() is None
    flash3._missing.cache_clear()
    error = RuntimeError("no FA3 kernels\ntrace")
    with (
        patch.object(flash3, "find_spec", lambda name: name),
        patch.object(_fa3, "_fa3_import_module", side_effect=error),
    ):
        assert flash3._missing() == "the flash_attn_3 package does not load: no FA3 kernels"
    flash3._missing.cache_clear()
    assert flash3._missing() == "the flash_attn_3 package is not installed"


@pytest.mark.parametrize(
    ("given", "change", "major", "deterministic", "reason"),
    [
        (tensors(), None, 9, False, "FlashAttention-3 takes bf16 and fp16 on cuda, not torch.bfloat16 on cpu"),
        (
            tensors(device="cuda"), ScoreChange(2.0), 9, False,
            "FlashAttention-3 has no soft-cap and no ALiBi",
        ),
        (
            tensors(dim=264, device="cuda"), None, 9, False,
            "FlashAttention-3 takes equal head dims, multiples of 8 up to 256, not 264 and 264",
        ),
        (tensors(device="cuda"), None, 8, False, "FlashAttention-3 runs only on Hopper (compute capability 9)"),
        (tensors(device="cuda"), None, 10, False, "FlashAttention-3 runs only on Hopper (compute capability 9)"),
        (
            tensors(dim=256, device="cuda"), None, 9, True,
            "FlashAttention-3 has no deterministic backward for head dims above 192",
        ),
        (tensors(dim=256, device="cuda"), None, 9, False, None),
        (tensors(device="cuda"), None, 9, True, None),
    ],
)  # fmt: skip
def test_refusal(given: tuple[SimpleNamespace, ...], change, major, deterministic, reason):
    with (
        patch.object(flash3, "capability", lambda device: (major, 0)),
        patch.object(flash3, "_missing", lambda: None),
        patch("torch.are_deterministic_algorithms_enabled", lambda: deterministic),
    ):
        assert KERNEL.refusal(*given, change) == reason
