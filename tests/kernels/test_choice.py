"""The choice of a kernel."""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from longspan.cp.engine.executor import Share
from longspan.errors import SpecError
from longspan.kernels import choice, efficient, flash2, flash3, flex, sdpa
from longspan.kernels.capability import capability
from longspan.kernels.choice import KERNELS, choose_auto, choose_kernel
from longspan.kernels.scores import ScoreChange
from longspan.plan import Layout, Mask, plan_attention


def zeros(dim=8, dim_v=8, dtype=torch.float32):
    q = torch.zeros(1, 2, 3, dim, dtype=dtype)
    return q, q, torch.zeros(1, 2, 3, dim_v, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "tensors", "chosen"),
    [
        ("auto", zeros(), "sdpa"),
        ("auto", zeros(6, 4), "reference"),
        ("auto", zeros(dtype=torch.float16), "sdpa"),
        ("sdpa", zeros(), "sdpa"),
        ("reference", zeros(), "reference"),
    ],
)
def test_chosen(name, tensors, chosen):
    assert choose_kernel(name, *tensors).name == chosen
    assert choose_kernel(name, *tensors) is KERNELS[chosen]


@pytest.mark.parametrize(
    ("name", "tensors", "text"),
    [
        (
            "flash9",
            zeros(),
            "kernel 'flash9' is not known\n\nhint: choose one of auto, flash3, cudnn, sdpa, flash2, efficient, flex, reference",
        ),
        (
            "sdpa",
            zeros(6, 4),
            "kernel 'sdpa' cannot compute this call: keys have dim 6 and values 4; flash attention takes equal dims\n\n"
            'hint: set kernel="auto"',
        ),
        (
            "auto",
            zeros(dtype=torch.int64),
            "kernel 'reference' cannot compute this call: torch.int64 is not a floating-point dtype\n\nhint: set kernel=\"auto\"",
        ),
    ],
)
def test_refusals(name, tensors, text):
    with pytest.raises(SpecError) as error:
        choose_kernel(name, *tensors)
    assert str(error.value) == text


CAP, ALIBI = ScoreChange(30.0), ScoreChange(slopes=torch.ones(2))
ABSENT = "not installed"


@contextmanager
def device(major, minor=0, flash_attn_2=ABSENT, flash_attn_3=ABSENT, triton=True, cudnn=91501):
    """A CUDA device of that compute capability, and what is installed beside it."""
    with ExitStack() as stack:
        for module in (choice, sdpa, flash2, flash3, efficient):
            stack.enter_context(patch.object(module, "capability", lambda device: (major, minor)))
        stack.enter_context(patch.object(flash2, "_missing", lambda: flash_attn_2))
        stack.enter_context(patch.object(flash3, "_missing", lambda: flash_attn_3))
        stack.enter_context(patch.object(flex, "_HAS_TRITON", triton))
        stack.enter_context(patch("torch.backends.cudnn.version", lambda: cudnn))
        yield


def on_cuda(dtype=torch.bfloat16, dim=64, dim_v=None):
    """q, k, v as far as the choice looks."""
    q, v = (
        SimpleNamespace(dtype=dtype, shape=(1, 2, 3, d), device=torch.device("cuda"), is_floating_point=lambda: True)
        for d in (dim, dim_v or dim)
    )
    return q, q, v


@pytest.mark.parametrize(
    ("dtype", "change", "chosen", "beside_flash_attn"),
    [
        (torch.bfloat16, None, "sdpa", "sdpa"),
        (torch.bfloat16, CAP, "flex", "flash2"),
        (torch.bfloat16, ALIBI, "flex", "flex"),
        (torch.float32, None, "efficient", "efficient"),
        (torch.float32, ALIBI, "flex", "flex"),
        (torch.float64, None, "reference", "reference"),
        (torch.float64, ALIBI, "reference", "reference"),
    ],
)
def test_chosen_on_cuda(dtype, change, chosen, beside_flash_attn):
    x = on_cuda(dtype)
    with device(8):
        assert choose_kernel("auto", *x, change).name == chosen
    with device(8, flash_attn_2=None):
        assert choose_kernel("auto", *x, change).name == beside_flash_attn
    with device(8, triton=False):
        assert choose_kernel("auto", *x, change).name == ("reference" if change else chosen)


FAST = {"flash_attn_3": None}


@pytest.mark.parametrize(
    ("major", "beside", "tensors", "regular", "chosen"),
    [
        (9, FAST, on_cuda(), False, "flash3"),
        (9, FAST, on_cuda(), True, "flash3"),
        (9, {}, on_cuda(), True, "cudnn"),
        (9, {}, on_cuda(torch.float16, 128), True, "cudnn"),
        (9, {}, on_cuda(), False, "sdpa"),  # bands, or the lengths of documents
        (9, {}, on_cuda(dim=256), True, "sdpa"),
        (9, {"cudnn": 91500}, on_cuda(), True, "sdpa"),
        (9, {"cudnn": None}, on_cuda(), True, "sdpa"),
        (9, FAST, on_cuda(torch.float32), True, "efficient"),
        (9, FAST, on_cuda(dim=192, dim_v=128), True, "efficient"),  # as in multi-head latent attention
        (10, FAST, on_cuda(), True, "cudnn"),
        (10, FAST, on_cuda(), False, "sdpa"),
        (8, FAST, on_cuda(), True, "sdpa"),
        (12, FAST, on_cuda(), True, "sdpa"),
        (7, FAST, on_cuda(torch.float16), True, "efficient"),
        (7, FAST, on_cuda(torch.bfloat16), True, "reference"),
        (9, FAST, on_cuda(torch.float32, 66), True, "reference"),
    ],
)
def test_auto_goes_by_the_device_and_what_is_installed(major, beside, tensors, regular, chosen):
    with device(major, **beside):
        assert choose_kernel("auto", *tensors, None, regular).name == chosen


def test_auto_keeps_to_deterministic_kernels_when_asked_to():
    with device(9), patch("torch.are_deterministic_algorithms_enabled", lambda: True):
        assert choose_kernel("auto", *on_cuda(), None, True).name == "sdpa"


def test_auto_says_why_not_the_faster_ones():
    with device(9):
        assert choose_auto(*on_cuda(), None, False) == (
            "sdpa",
            {
                "flash3": ABSENT,
                "cudnn": "cuDNN attention suits plans of full and causal tiles whose sides are multiples of 128",
            },
        )
    with device(8):
        assert choose_auto(*on_cuda())[1]["cudnn"] == (
            "cuDNN attention is faster than flash attention only on Hopper and Blackwell"
        )


@pytest.mark.parametrize(
    ("mask", "layout", "regular"),
    [
        (Mask.causal(1024), "zigzag", (True, True)),
        (Mask.causal(1024), "contiguous", (True, True)),
        (Mask.full(1024), "striped", (True, True)),
        (Mask.causal(1024), "striped", (False, True)),  # of rank 0 a tile below the diagonal: 511 x 511
        (Mask.causal(1022), "contiguous", (False, False)),
        (Mask.causal(1024, window=256), "contiguous", (False, False)),
        (Mask.documents([380, 644]), "contiguous", (False, False)),
        (Mask.documents([256] * 4), "zigzag", (True, True)),
        (Mask.documents([128] * 8), "contiguous", (False, False)),  # four tiles: one call of flash attention
    ],
)
def test_plans_for_which_cudnn_is_fast(mask, layout, regular):
    plan = plan_attention(Layout.named(layout, mask.seq_len, 2), mask, "ring")
    assert tuple(Share.of(plan, rank, None, "auto").regular for rank in range(2)) == regular


def test_a_share_takes_cudnn_for_such_plans_alone():
    layout = Layout.contiguous(256, 1)
    for mask, chosen in ((Mask.causal(256), "cudnn"), (Mask.causal(256, window=100), "sdpa")):
        share = Share.of(plan_attention(layout, mask, "ring"), 0, None, "auto")
        with device(9, flash_attn_3="not installed"):
            assert share.kernel_for(*on_cuda()).name == chosen


def test_the_choice_is_made_once_for_calls_alike():
    share = Share.of(plan_attention(Layout.contiguous(256, 1), Mask.causal(256), "ring"), 0, None, "auto")
    with device(9), patch.object(choice, "choose_auto", wraps=choice.choose_auto) as chosen:
        for tensors in (on_cuda(), on_cuda(torch.float32)) * 3:
            share.kernel_for(*tensors)
        assert chosen.call_count == 2
        share.kernel_for(*on_cuda(), CAP)
        share.kernel_for(*on_cuda(), ScoreChange(20.0))
        assert chosen.call_count == 3


@pytest.mark.parametrize(("hip", "counts"), [(None, (9, 4)), ("7.0", (8, 0))])
def test_the_capability_of_amd_is_no_hopper(hip, counts):
    # An MI300 calls itself 9.4.
    with patch("torch.version.hip", hip), patch("torch.cuda.get_device_capability", lambda device: (9, 4)):
        assert capability(torch.device("cuda")) == counts


@pytest.mark.parametrize("change", [CAP, ALIBI])
def test_changes_of_scores_are_the_reference_kernels_on_cpu(change):
    assert choose_kernel("auto", *zeros(16, 16), change).name == "reference"
