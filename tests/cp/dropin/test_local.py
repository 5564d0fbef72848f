"""Operators over one rank's tokens: 30 tokens on 2 ranks, and so dims of 15 rows. Refused by name, in one process."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from longspan.cp.dropin.intercept import intercepted
from longspan.cp.dropin.local import HF_WAY_OUT, KINDS, LocalTokens
from longspan.errors import SpecError
from tests.oracle import raised

S, T = 30, 15
IDS = torch.arange(T)
X = torch.randn(2, T, 4, generator=torch.Generator().manual_seed(0))
TABLE = torch.randn(64, 4)
EMBEDDING, LSTM = nn.Embedding(64, 4), nn.LSTM(4, 4, batch_first=True)


def inside(call, allowed=(), mode=torch.enable_grad):
    """What `call` raises on a rank with 15 of 30 tokens, without the place that it names."""
    with mode(), intercepted(F.scaled_dot_product_attention, T, LocalTokens.of(S, frozenset({T}), allowed)):
        kind, text = raised(call)
    return kind, re.sub(r" in \S+ \(tests\.cp\.dropin\.test_local, line \d+\)", "", text)


REFUSED = {
    "arange": ("arange", "aten.arange counts", lambda: torch.arange(T)),
    "arange of floats": ("arange", "aten.arange counts", lambda: torch.arange(15, 30, dtype=torch.float64)),
    "linspace": ("arange", "aten.linspace counts", lambda: torch.linspace(0, 1, T)),
    "positions of ones": ("cumsum", "aten.cumsum accumulates", lambda: torch.ones(1, T).cumsum(1)),
    "cumsum in place": ("cumsum", "aten.cumsum_ accumulates", lambda: torch.ones(1, T).cumsum_(1)),
    "cumprod": ("cumsum", "aten.cumprod accumulates", lambda: X.cumprod(1)),
    "cummax": ("cumsum", "aten.cummax accumulates", lambda: X.cummax(1)),
    "table of positions": ("slice", "aten.slice counts or shifts", lambda: torch.arange(64)[None][:, :T]),
    "table of rotations": ("slice", "aten.slice counts or shifts", lambda: TABLE[:T]),
    "learned positions": ("slice", "aten.slice counts or shifts", lambda: EMBEDDING.weight[:T]),
    "labels from the second": ("slice", "aten.slice counts or shifts", lambda: IDS[None, 1:]),
    "logits but the last": ("slice", "aten.slice counts or shifts", lambda: X[:, :-1]),
    "logits of the last": ("slice", "aten.slice counts or shifts", lambda: X[:, -1:]),
    "the last token": ("slice", "aten.select takes the last of", lambda: X[:, -1]),
    "padded labels": ("slice", "aten.constant_pad_nd shifts", lambda: F.pad(IDS, (0, 1), value=-100)),
    "shifted states": ("slice", "aten.constant_pad_nd shifts", lambda: F.pad(X, (0, 0, 1, -1))),
    "roll": ("roll", "aten.roll moves", lambda: X.roll(-1, 1)),
    "flip": ("roll", "aten.flip moves", lambda: X.flip(1)),
    "softmax": ("softmax", "aten._softmax attends to", lambda: torch.zeros(2, T, T).softmax(-1)),
    "softmax with a sink": ("softmax", "aten._softmax attends to", lambda: torch.zeros(2, T, T + 1).softmax(-1)),
    "softmax over rows": ("softmax", "aten._softmax attends to", lambda: torch.zeros(T, T).softmax(0)),
    "scores": ("matmul", "aten.bmm multiplies", lambda: X @ X.mT),
    "scores and a bias": ("matmul", "aten.baddbmm multiplies", lambda: torch.baddbmm(torch.zeros(T, T), X, X.mT)),
    "state of linear attention": ("matmul", "aten.bmm multiplies", lambda: X.mT @ X),
    "scores by einsum": ("matmul", "aten.bmm multiplies", lambda: torch.einsum("bqd,bkd->bqk", X, X)),
    "convolution": ("conv", "aten.convolution convolves", lambda: F.conv1d(X.mT, torch.ones(4, 4, 3), padding=2)),
    "padded before": ("conv", "aten.convolution convolves", lambda: F.conv1d(torch.ones(1, 1, T + 2), torch.ones(1, 1, 3))),
    "lstm": ("recurrent", "torch.lstm runs over", lambda: LSTM(X)),
}  # fmt: skip
WAYS_OUT = {
    "arange": "add the positions of the sequence, such as position_ids = torch.arange(S)[None], to buffers",
    "slice": "add the table, or the labels shifted on the global row, to buffers",
    "cumsum": "compute it on the global sequence and add the result to buffers",
    "softmax": "call torch.nn.functional.scaled_dot_product_attention",
    "matmul": "call torch.nn.functional.scaled_dot_product_attention",
    "conv": "run this layer outside context_parallel, on global tensors",
    "recurrent": "run this layer outside context_parallel, on global tensors",
    "roll": "reorder the global tensor before it is sharded",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_unless_allowed(name):
    kind, does, call = REFUSED[name]
    text = (
        f"{does} one rank's tokens, not the 30 of the sequence\n\n"
        f'hint: {WAYS_OUT[kind]}; or set allow_local=("{kind}",) if its dim is not the sequence'
    )
    assert inside(call) == ("SpecError", text)
    assert inside(call, KINDS) == inside(call, kind) == ("", "")


@pytest.mark.parametrize("name", ["scores by einsum", "softmax", "convolution", "the last token"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_refused_without_gradients(name, mode):
    assert inside(REFUSED[name][2], mode=mode)[0] == "SpecError"


def in_transformers(code, module):
    """Run code as if it were of a module of transformers."""
    return lambda: exec(code, {"__name__": module, "torch": torch, "T": T})


def test_models_of_transformers_are_sent_to_their_own_way():
    kind, text = inside(in_transformers("torch.arange(T)", "transformers.models.llama.modeling_llama"))
    assert kind == "SpecError"
    assert text == (
        "aten.arange in <module> (transformers.models.llama.modeling_llama, line 1) counts one rank's tokens, not the 30 of "
        f"the sequence\n\nhint: {WAYS_OUT['arange']}; or {HF_WAY_OUT}; "
        'or set allow_local=("arange",) if its dim is not the sequence'
    )


def padded_rows():
    padded = F.pad(X * torch.ones(4, requires_grad=True), (0, 0, 0, 1))
    return padded[:, :T].sum().backward()


def a_layer():
    """Backward contracts over the tokens, and rightly so."""
    weight = torch.ones(2, 4, 3, requires_grad=True)
    (X.clone().requires_grad_() @ weight).sum().backward()
    assert weight.grad is not None


ALLOWED = {
    "other lengths": lambda: (torch.arange(16), torch.arange(0, 30, 2), torch.ones(16).cumsum(0), X.softmax(-1)),
    "rotation": lambda: torch.ones(2, T, 1) @ torch.ones(2, 1, T),
    "experts": lambda: torch.ones(2, 3, T) @ nn.Parameter(torch.ones(2, T, 8)),
    "parts of a row": lambda: (X[..., :2], X.split(5, 1), X[:, 5:10], X[:, 0], X.chunk(3, 1)),
    "pointwise convolution": lambda: F.conv1d(X.mT, torch.ones(4, 4, 1)),
    "padded rows": padded_rows,
    "a layer": a_layer,
    "print": lambda: (str(IDS), str(torch.arange(2000.0))),
    "masks": in_transformers("torch.arange(T)", "transformers.masking_utils"),
    "a column of heads": lambda: F.pad(X, (0, 1)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_not_refused(name):
    assert inside(ALLOWED[name]) == ("", "")


def test_unknown_kinds():
    with pytest.raises(SpecError) as error:
        LocalTokens.of(S, frozenset({T}), ("aranges",))
    assert str(error.value) == (
        "allow_local=['aranges'] is not known\n\n"
        "hint: choose among arange, slice, cumsum, softmax, matmul, conv, recurrent, roll"
    )
