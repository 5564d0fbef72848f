"""What `benchmarks.peers` rests on, apart from the peers: inputs, stand-ins, the comparison, the page."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from benchmarks.peers import kernels
from benchmarks.peers.cases import document_lengths, make_cases, make_inputs
from benchmarks.peers.measure import _errors
from benchmarks.peers.show import MARKS, write_markdown

from longspan import Layout, shard


def test_documents_fill_the_row_in_an_order_that_does_not_change(tmp_path):
    sizes = {"a.py": 8, "b.py": 0, "c.py": 400, "d/e.py": 10, "test/f.py": 4}
    for name, size in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
    # 2 and 3 tokens; the empty file, the one longer than the row and the tests are passed over.
    assert sorted(document_lengths(5, tmp_path)) == [2, 3]
    assert sum(document_lengths(4, tmp_path)) == 4
    with pytest.raises(ValueError, match="fewer than 6 tokens"):
        document_lengths(6, tmp_path)
    assert document_lengths(4096) == document_lengths(4096)


@pytest.mark.parametrize("case", make_cases(300, 70), ids=lambda case: case.name)
def test_local_attention_is_that_of_the_dense_mask(case):
    *qkv, dout = (x.double() for x in make_inputs(case))
    visible = torch.from_numpy(case.mask.dense())
    found = []
    for attend in (
        kernels.local_attention(case),
        kernels.plain_attention(case),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True),
    ):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attend(*leaves)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in leaves)])
    for ours in found[:2]:
        for x, right in zip(ours, found[2], strict=True):
            assert (x - right).abs().max() <= 1e-10 * right.abs().max()


def test_rows_that_see_nothing_are_zero_and_weightless():
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 100, 8)
    out, lse = kernels.flash_forward(q, k, k, True, 20, 0, None)
    assert (out[:, :, :200] == 0).all()
    assert (lse[:, :, :200] == float("-inf")).all()
    right, _ = kernels.flash_forward(q[:, :, 200:], k, k, True, 20, 0, None)
    assert torch.equal(out[:, :, 200:], right)


def test_stand_in_for_flash_attn_does_not_stay():
    with kernels.flash_attn_stand_in():
        module = importlib.import_module("flash_attn")
    q = torch.randn(1, 40, 2, 8)
    right = F.scaled_dot_product_attention(*(q.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(module.flash_attn_func(q, q, q, causal=True), right)
    with pytest.raises(AssertionError, match="softcap"):
        module.flash_attn_func(q, q, q, causal=True, softcap=2.0)
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")


def test_errors_are_relative_to_the_largest_value_and_nan_is_infinite():
    layout = Layout.zigzag(8, 2)
    right = tuple(torch.arange(1.0, 9.0).view(1, 1, 8, 1) for _ in range(4))
    ours = [shard(x, layout, 1, 2) for x in right]
    ours[1] = ours[1] + 0.08
    ours[3] = ours[3] * float("nan")
    errors = _errors(tuple(ours), right, layout, 1)
    assert errors == {"out": 0.0, "dq": pytest.approx(0.01, rel=1e-5), "dk": 0.0, "dv": float("inf")}


def test_markdown_goes_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_markdown("new\n", page)
    write_markdown("newer\n", page)
    assert page.read_text() == f"before\n{MARKS[0]}\n\nnewer\n\n{MARKS[1]}\nafter\n"
    plain = tmp_path / "plain.md"
    write_markdown("all\n", plain)
    assert plain.read_text() == "all\n"
