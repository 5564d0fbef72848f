"""What is right: dense attention over the whole sequence and its gradients by autograd, and how far off a result is."""

from typing import NamedTuple

import torch

from longspan.plan import Mask

Tensor = torch.Tensor


class Answer(NamedTuple):
    """Global out `(B, H, S, Dv)` and gradients; `dsink (H,)` is None without a sink."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None = None


class Inputs(NamedTuple):
    """Global tensors: q `(B, H, S, D)`, k `(B, K, S, D)`, v `(B, K, S, Dv)`, dout like out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def make_inputs(S, heads=(4, 2), batch=1, dim=8, dim_v=None, dtype=torch.float64, seed=0) -> Inputs:
    """Normal tensors, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    H, K = heads
    dim_v = dim if dim_v is None else dim_v
    sizes = ((H, dim), (K, dim), (K, dim_v), (H, dim_v))
    return Inputs(*(torch.randn(batch, n, S, d, generator=generator, dtype=torch.float64).to(dtype) for n, d in sizes))


def dense_attention(
    inputs: Inputs, visible: Mask | Tensor, scale: float | None = None, sink: Tensor | None = None
) -> Answer:
    """Softmax over the visible keys, 0 for queries that see nothing, in the inputs' own type. `visible` may be bool `(S, S)`."""
    seen = torch.from_numpy(visible.dense()) if isinstance(visible, Mask) else visible
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    sink = None if sink is None else sink.detach().clone().requires_grad_()
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    else:
        # A row that sees nothing has no softmax; one of zeros in its place, hidden afterwards, keeps its gradient 0.
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].masked_fill(~seen, 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    out.backward(inputs.dout)
    return Answer(out.detach(), q.grad, k.grad, v.grad, None if sink is None else sink.grad)


def relative_error(got: Tensor, want: Tensor, floor: float = 1e-3) -> float:
    """Greatest difference over the greatest right value (at least `floor`); NaN counts as infinite."""
    if not want.numel():
        return 0.0
    error = ((got.double() - want.double()).abs().max() / want.abs().max().clamp(min=floor)).item()
    return error if error == error else float("inf")


def raised(function, *arguments, **keywords) -> tuple[str, str]:
    """Type and text of the exception that the call raises, `("", "")` if none: for ranks, which cannot use `pytest.raises`."""
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
