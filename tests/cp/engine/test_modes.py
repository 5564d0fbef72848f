"""Torch's modes round attention: as `scaled_dot_product_attention`, or refused by name; nothing is dropped in silence."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longspan import Projections, projected_attention
from longspan.cp.attention import attention
from longspan.errors import SpecError
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs, relative_error

PLAN = plan_attention(Layout.zigzag(16, 1), Mask.causal(16))


def inputs(dtype=torch.float32):
    q, k, v, dout = make_inputs(16, (4, 2), dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)], dout


def attend(q, k, v, **options):
    return attention(q, k, v, plan=PLAN, **options)


def gradients(make, dtype=torch.float32):
    (q, k, v), dout = inputs(dtype)
    out = make(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))]


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_autocast_is_that_of_sdpa(kernel, dtype):
    def theirs(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    exact = gradients(theirs, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        # Backward runs inside too: what is computed there is not cast either.
        ours, others = gradients(lambda *x: attend(*x, kernel=kernel), dtype), gradients(theirs, dtype)
    assert [x.dtype for x in ours] == [x.dtype for x in others]
    for name, got, other, right in zip(("out", "dq", "dk", "dv"), ours, others, exact, strict=True):
        assert relative_error(got.double(), right) <= 2 * relative_error(other.double(), right) + 1e-6, name


def test_autocast_is_refused_where_a_layer_projects_by_itself():
    plan = plan_attention(Layout.zigzag(16, 1), Mask.causal(16), "upipe", (2, 2))
    weight = torch.eye(16)
    maps = Projections(weight, weight, weight, weight, head_dim=8)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(SpecError, match=r"route 'upipe' was called under autocast"),
    ):
        projected_attention(torch.ones(1, 16, 16), maps, plan=plan)


def test_no_grad_and_inference_mode():
    (q, k, v), _ = inputs()
    right = attend(q, k, v).detach()
    with torch.no_grad():
        assert torch.equal(attend(q, k, v), right)
        assert not attend(q, k, v).requires_grad
    with torch.inference_mode():
        out = attend(*(x.detach().clone() for x in (q, k, v)))
        assert out.is_inference()
        assert torch.equal(out, right)


def test_deterministic_algorithms_and_anomaly_detection():
    plain = gradients(attend)
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(gradients(attend), plain, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autograd.set_detect_anomaly(True):
        assert all(torch.equal(a, b) for a, b in zip(gradients(attend), plain, strict=True))


def _reentrant(q, k, v):
    return checkpoint(attend, q, k, v, use_reentrant=True)


def _on_cpu(q, k, v):
    with torch.autograd.graph.save_on_cpu():
        return attend(q, k, v)


def _by_hooks(q, k, v):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
        return attend(q, k, v)


@pytest.mark.parametrize("make", [_on_cpu, _by_hooks])
def test_saved_tensors_may_be_kept_elsewhere(make):
    assert all(torch.equal(a, b) for a, b in zip(gradients(make), gradients(attend), strict=True))


def test_reentrant_checkpoint():
    (q, k, v), dout = inputs()
    _reentrant(q, k, v).backward(dout)  # this one works by .backward() alone
    assert all(torch.equal(a.grad, b) for a, b in zip((q, k, v), gradients(attend)[1:], strict=True))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
        lambda f, q: torch.func.vmap(f)(q[None]),
        lambda f, q: torch.func.jvp(f, (q,), (q,)),
        lambda f, q: torch.func.jacrev(f)(q),
    ],
)
def test_transforms_of_torch_func_are_refused(transform):
    (q, k, v), _ = inputs()
    with pytest.raises(SpecError, match=r"inside a torch.func transform"):
        transform(lambda q: attend(q, k.detach(), v.detach()), q.detach())


def test_forward_mode_tangents_are_refused():
    (q, k, v), _ = inputs()
    with forward_ad.dual_level(), pytest.raises(SpecError, match=r"an input has a forward-mode tangent"):
        attend(q, forward_ad.make_dual(k.detach(), k.detach()), v)


def test_a_gradient_has_no_gradient():
    (q, k, v), _ = inputs()
    (dq,) = torch.autograd.grad(attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(SpecError, match=r"a second derivative was requested"):
        torch.autograd.grad(dq.sum(), q)
