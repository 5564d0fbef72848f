"""`context_parallel`: small programs around plain SDPA, each right or refused with a text; none silently local.

`PROGRAMS` run on two ranks. One returns how far it is from what is right, or the type and text of what was raised.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import checkpoint

from longspan import context_parallel
from longspan.names import LAYOUTS
from longspan.plan import Layout, Mask
from tests.oracle import Inputs, dense_attention, make_inputs, raised, relative_error
from tests.ranks import run_ranks

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "drop-in.md"
S = 21
CAUSAL = Mask.causal(S)


def without_place(text):
    """An error without the function and line that it names."""
    return re.sub(r" in \S+ \(\S+, line \d+\)", "", text)


class Program:
    """Global q, k, v to be given as buffers, on this rank."""

    def __init__(self, group, rank, heads=(4, 4), dtype=torch.float64):
        self.group, self.rank = group, rank
        self.inputs = make_inputs(S, heads, batch=2, dtype=dtype)
        self.q, self.k, self.v, _ = (x.clone() for x in self.inputs)

    def context(self, **how):
        return context_parallel(self.group, buffers=(self.q, self.k, self.v), buffer_seq_dims=(2, 2, 2), **how)

    def error(self, attend, sees=CAUSAL, scale=None, **how):
        """How far `attend(q, k, v)` inside the context is from the dense answer; infinite if buffers are not restored."""
        with self.context(**how) as dropin:
            out = dropin.unshard(attend(self.q, self.k, self.v), 2)
        return max(relative_error(out, dense_attention(self.inputs, sees, scale).out), self.changed)

    def refusal(self, attend, **how):
        """What `attend(q, k, v)` inside the context raises, through it."""

        def run():
            with self.context(**how):
                attend(self.q, self.k, self.v)

        found = raised(run)
        return ("buffers changed", "") if self.changed else (found[0], without_place(found[1]))

    @property
    def changed(self):
        same = all(torch.equal(x, y) for x, y in zip((self.q, self.k, self.v), self.inputs[:3], strict=True))
        return 0.0 if same else float("inf")


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attend(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def hidden(name, hint="call torch.nn.functional.scaled_dot_product_attention, or leave the block for it"):
    return (
        "SpecError",
        f"{name} was called inside context_parallel, where it would see only this rank's keys\n\nhint: {hint}",
    )


# Spellings.


def functional(p):
    return p.error(causal)


def a_name_imported_before(p):
    return p.error(lambda q, k, v: imported_before(q, k, v, None, 0.0, True))


def keywords(p):
    return p.error(
        lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q, is_causal=True, dropout_p=0.0)
    )


def torch_ops(p):
    return p.error(lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True))


def torch_ops_overload(p):
    return p.error(lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, is_causal=True))


def torch_c(p):
    return p.error(lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True))


def another_backend_chosen(p):
    with sdpa_kernel(SDPBackend.MATH):
        return p.error(causal)


def exported(p):
    shards = tuple(x[:, :, : 11 - p.rank] for x in p.inputs[:3])
    return p.error(torch.export.export(Attend(), shards).module())


def compiled_inside(p):
    return max(p.error(torch.compile(causal, backend="aot_eager", fullgraph=full)) for full in (False, True))


def compiled_before(p):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(causal, backend=backend, fullgraph=True, dynamic=True)
    before = compiled(*p.inputs[:3])
    ours = p.error(compiled)
    after = compiled(*p.inputs[:3])
    assert len(graphs) == 1  # inside it ran eagerly, and what was compiled is still there
    return max(ours, relative_error(after, before))


def compiled_by_inductor_before(p):
    torch._dynamo.reset()
    compiled = torch.compile(causal)
    shards = [x[:, :, : 11 - p.rank].clone() for x in p.inputs[:3]]
    compiled(*shards)  # of the very shapes that it will meet inside
    return p.error(compiled)


def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def torch_script(p):
    """In training, inference and by plain math, which hides from torch's own modes what it computes."""
    script = torch.jit.script(scripted)
    errors = [p.error(script), p.error(torch.inference_mode()(script)), p.error(torch.inference_mode()(causal))]
    with sdpa_kernel(SDPBackend.MATH):
        errors.append(p.error(script))
    return max(errors)


def layers_of_torch(p):
    """`(1, T, 32)` through attention that calls SDPA from within torch."""
    x = p.inputs.q[0].movedim(0, 1).reshape(1, S, 32).contiguous()
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True, dtype=torch.float64).eval()
    wanted = [layer(x, x, x, need_weights=False)[0], encoder(x)]
    with context_parallel(p.group, buffers=(x,), buffer_seq_dims=(1,)) as dropin:
        found = [layer(x, x, x, need_weights=False)[0], encoder(x)]
        with torch.no_grad():
            found.append(encoder(x))
        with torch.inference_mode():
            found.append(encoder(x))
    found = [dropin.unshard(y, 1) for y in found]
    return max(relative_error(y, w) for y, w in zip(found, [*wanted, wanted[1], wanted[1]], strict=True))


def attention_with_weights(p):
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    return [
        p.refusal(lambda q, k, v: layer(q[0], k[0], v[0])),
        p.refusal(lambda q, k, v: layer(q[0], k[0], v[0], None, True)),
    ]


@torch.library.custom_op("longspan_tests::block", mutates_args=())
def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return causal(q, k, v)


def an_operator_of_ones_own(p):
    return p.refusal(block)


def in_a_thread(attend, *inputs):
    found = []
    thread = Thread(target=lambda: found.append(raised(attend, *inputs)))
    thread.start()
    thread.join()
    return found[0]


def a_thread_started_inside(p):
    with p.context():
        return in_a_thread(causal, p.q, p.k, p.v)


def flash_for_cpu(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0]


@torch.library.custom_op("longspan_tests::kernel", mutates_args=())
def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_for_cpu(q, k, v).clone()


def a_kernel_out_of_sight(p):
    """In an operator of one's own, and in a thread started inside: no mode sees it there."""
    with p.context():
        return [raised(kernel, p.q, p.k, p.v), in_a_thread(flash_for_cpu, p.q, p.k, p.v)]


def a_thread_from_before(p):
    """It may do other work, but not with as many rows as are here: SDPA, compiled, and a kernel."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        calls = [causal, torch.compile(causal, backend="aot_eager"), flash_for_cpu]
        with p.context():
            return [pool.submit(raised, call, p.q, p.k, p.v).result()[1].split("\n")[0] for call in calls]


def a_thread_of_other_work(p):
    """One that has run since before goes on as ever."""
    begin, end, found = Event(), Event(), []

    def work():
        begin.wait(30)
        found.append(causal(*leaves))
        end.set()

    leaves = [x.clone().requires_grad_() for x in p.inputs[:3]]
    thread = Thread(target=work, daemon=True)
    thread.start()
    with p.context():
        begin.set()
        end.wait(30)
    thread.join()
    found[0].backward(p.inputs.dout)
    wanted = dense_attention(p.inputs, CAUSAL)
    return max(relative_error(x, y) for x, y in zip((found[0], *(x.grad for x in leaves)), wanted[:4], strict=True))


def higher_order(p):
    return p.refusal(lambda q, k, v: torch.cond(torch.tensor(True), causal, lambda *x: x[0].clone(), (q, k, v)))


def transformed(p):
    """Neither reaches the whole sequence: one is refused here, the other by torch."""
    return [p.refusal(torch.vmap(causal)), p.refusal(torch.func.grad(lambda *x: causal(*x).sum()))]


def other_attention(p):
    aten = torch.ops.aten
    return [
        p.refusal(flex_attention),
        p.refusal(torch.compile(flex_attention)),
        p.refusal(aten._scaled_dot_product_flash_attention_for_cpu),
        p.refusal(torch._scaled_dot_product_attention_math),
    ]


# What SDPA takes.


def options(p):
    q, k = p.inputs.q, p.inputs.k
    grouped = Program(p.group, p.rank, (4, 2))
    one = Program(p.group, p.rank, (4, 1))
    wanted = F.scaled_dot_product_attention(q, k, p.inputs.v, scale=0.3)
    with p.context() as dropin:
        found = dropin.unshard(F.scaled_dot_product_attention(p.q, p.k, p.v, scale=0.3), 2)
    return max(
        relative_error(found, wanted),
        p.error(lambda *x: F.scaled_dot_product_attention(*x, scale=0.3), Mask.full(S), 0.3),
        grouped.error(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)),
        one.error(causal),
    )


def other_numbers_of_dims(p):
    """`(H, T, D)`, `(T, D)` and `(A, B, H, T, D)`."""
    return max(
        p.error(lambda q, k, v: torch.stack([causal(q[b], k[b], v[b]) for b in range(2)])),
        p.error(lambda q, k, v: causal(q[:, None], k[:, None], v[:, None])[:, 0]),
        p.error(
            lambda q, k, v: torch.stack(
                [torch.stack([causal(q[b, h], k[b, h], v[b, h]) for h in range(4)]) for b in range(2)]
            )
        ),
    )


def autocast(p):
    """q and k of another type than v, as after a rotation in fp32, are cast as SDPA casts them."""
    p = Program(p.group, p.rank, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with p.context() as dropin:
            out = causal(p.q, p.k, p.v.bfloat16())
        wanted = causal(*p.inputs[:3])
    assert out.dtype == wanted.dtype == torch.bfloat16
    exact = dense_attention(Inputs(*(x.double() for x in p.inputs)), CAUSAL).out
    ours, theirs = (relative_error(x, exact) for x in (dropin.unshard(out, 2), wanted))
    return 0.0 if ours <= 2 * theirs else ours


MASKS = [
    CAUSAL,
    Mask.full(S),
    Mask.causal(S, window=4),
    Mask.documents([5, 1, 1, 9, 5]),
    Mask.documents([12, 9], causal=False),
    Mask.documents([12, 9], window=3),
    Mask.prefix(S, 8),
    Mask.bands(S, [(3, 9, 0, S, None, None)]),
]


def dense_masks(p):
    errors = []
    for mask in MASKS:
        seen = torch.from_numpy(mask.dense())
        added = torch.zeros(S, S, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        for given in (seen, seen[None, None], added, added.expand(2, 4, S, S)):
            errors.append(p.error(lambda *x, given=given: F.scaled_dot_product_attention(*x, attn_mask=given), mask))
    padding = torch.arange(S) < 17
    errors.append(
        p.error(
            lambda *x: F.scaled_dot_product_attention(*x, attn_mask=padding[None, None, None]),
            Mask.bands(S, [(0, S, 0, 17, None, None)]),
        )
    )
    return max(errors)


def a_mask_that_is_written_to(p):
    seen = torch.from_numpy(CAUSAL.dense())
    with p.context() as dropin:
        first, again = (F.scaled_dot_product_attention(p.q, p.k, p.v, seen) for _ in range(2))
        seen[12:, :12] = False
        second = F.scaled_dot_product_attention(p.q, p.k, p.v, seen)
    wanted = [dense_attention(p.inputs, mask).out for mask in (CAUSAL, CAUSAL, Mask.documents([12, 9]))]
    return max(relative_error(dropin.unshard(x, 2), w) for x, w in zip((first, again, second), wanted, strict=True))


SHARED = Mask.shared_prefix(6, [8, 7])


def a_mask_of_the_context(p):
    seen = torch.from_numpy(SHARED.dense())
    both = Mask.documents([12, 9], causal=False)
    return max(
        p.error(F.scaled_dot_product_attention, SHARED, mask=SHARED),
        p.error(causal, SHARED, mask=SHARED),
        p.error(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=seen), SHARED, mask=SHARED, layout="balanced"),
        p.error(F.scaled_dot_product_attention, both, mask=both, seq_len=S),
    )


def layouts_and_routes(p):
    grouped = Program(p.group, p.rank, (4, 2))

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    errors = [p.error(causal, layout=layout) for layout in ("contiguous", "striped")]
    errors += [grouped.error(attend, route=route) for route in ("ulysses", "usp", "exchange", "auto", "ulysses-ring")]
    errors += [grouped.error(attend, route="usp", inner=2), grouped.error(attend, kernel="reference")]
    p.group = init_device_mesh("cpu", (2,))
    return max(*errors, p.error(causal))


def refused_arguments(p):
    def attend(**how):
        return p.refusal(lambda *x: F.scaled_dot_product_attention(*x, **how))[1]

    learned = torch.zeros(S, S, requires_grad=True)
    ragged = torch.ones(S, S, dtype=torch.bool)
    ragged[4, 2] = False
    rows = torch.ones(2, 1, S, S, dtype=torch.bool)
    rows[1, 0, 3:] = False
    return [
        attend(dropout_p=0.1),
        attend(attn_mask=ragged, is_causal=True),
        attend(attn_mask=ragged),
        attend(attn_mask=rows),
        attend(attn_mask=torch.full((S, S), torch.finfo(torch.float32).min).triu(1)),
        attend(attn_mask=learned),
        attend(attn_mask=torch.ones(S, S, dtype=torch.int64)),
        attend(attn_mask=torch.ones(9, 9, dtype=torch.bool)),
        attend(attn_mask=torch.ones(10, 10, dtype=torch.bool)),
        attend(attn_mask=torch.ones(2, 1, 1, 11, dtype=torch.bool)),
        attend(scale=-1.0),
        p.refusal(lambda q, k, v: causal(q, k[:, :2], v[:, :2]))[1],
        p.refusal(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v, enable_gqa=True))[1],
        p.refusal(causal, mask=Mask.full(S))[1],
        p.refusal(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=ragged), mask=CAUSAL)[1],
        p.refusal(lambda q, k, v: causal(q[0, 0, 0], k[0, 0, :3], v[0, 0, :3]))[1],
        p.refusal(lambda *x: F.scaled_dot_product_attention(*x, causal=True))[0],
    ]


AS_A_MASK = "\n\nhint: give a bool mask, True where a query sees a key, or a float mask of 0 and -inf"
WHOLE = "\n\nhint: give the mask of the global sequence and leave the mask out of buffers, or set is_causal=True"
OF_A_SHARD = (
    " covers one rank's tokens, not the 21 of the sequence; transformers makes such masks of padding, windows, or positions "
    "that jump\n\nhint: give the mask of the global sequence, outside buffers. With transformers, add an attention_mask of "
    'ones, (1, S), to buffers if only positions jump; else call model.set_attn_implementation("longspan") and run the model '
    "by longspan.hf.sequence"
)
GROUPED = "\n\nhint: give k and v as many heads as q, or with enable_gqa=True a number of heads that divides that of q"
REFUSED = [
    "dropout_p=0.1: longspan attention has no dropout\n\nhint: set dropout_p=0.0",
    "both attn_mask and is_causal are set\n\nhint: leave one of them out",
    "query 4 of attn_mask sees 2 separate ranges of keys: visible keys must be contiguous\n\n"
    "hint: set mask=Mask.bands(seq_len, bands) of context_parallel, or call longspan.attention",
    "attn_mask of shape (2, 1, 21, 21) differs between batch rows or heads\n\n"
    "hint: call attention once for each batch row, or concatenate the rows into one sequence (Mask.concat)",
    "attn_mask is a bias, with values other than 0 and -inf; longspan attention takes masks only" + AS_A_MASK,
    "attn_mask is a learned bias; longspan attention takes masks only" + AS_A_MASK,
    "attn_mask is torch.int64" + AS_A_MASK,
    "attn_mask must have shape (..., 21, 21), the pairs of the global sequence, not (9, 9)" + WHOLE,
    "attn_mask of shape (10, 10)" + OF_A_SHARD,
    "attn_mask of shape (2, 1, 1, 11)" + OF_A_SHARD,
    "scale=-1.0 is not a positive number\n\nhint: for a negative scale, negate q",
    "q, k and v have 4, 2 and 2 heads, enable_gqa=False" + GROUPED,
    "q, k and v have 4, 2 and 4 heads, enable_gqa=True" + GROUPED,
    "is_causal=True contradicts the mask of context_parallel, in which queries see later keys\n\n"
    "hint: set is_causal=False to use the mask of context_parallel, or leave mask out of context_parallel",
    "attn_mask differs from the mask of context_parallel\n\nhint: leave attn_mask out; mask= applies already",
    "q (8,), k (3, 8), v (3, 8): SDPA takes (..., tokens, head_dim)",
    "TypeError",
]


def lengths(p):
    """Cross attention, and tensors that were not sharded."""
    whole = p.inputs.q
    return [
        p.refusal(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4]))[1],
        p.refusal(lambda q, k, v: F.scaled_dot_product_attention(whole, whole, whole))[1],
        p.refusal(lambda q, k, v: F.scaled_dot_product_attention(q, whole, whole))[1],
    ]


HELD = {rank: f"rank {rank} holds {11 - rank} of 21 tokens" for rank in range(2)}
OUTSIDE = "\n\nhint: call cross-attention outside context_parallel, on global tensors"
LENGTHS = {
    rank: [
        f"q, k and v have {11 - rank}, 4 and 4 rows, and {HELD[rank]}; cross-attention cannot be sharded" + OUTSIDE,
        f"q, k and v have 21 rows, and {HELD[rank]}\n\n"
        "hint: add the tensors that q, k and v are computed from to buffers, with their sequence dims",
        f"q, k and v have {11 - rank}, 21 and 21 rows, and {HELD[rank]}; cross-attention cannot be sharded" + OUTSIDE,
    ]
    for rank in range(2)
}

# Exceptions and nesting.


class UserError(Exception):
    pass


def an_exception_of_the_user(p):
    def fail(q, k, v):
        causal(q, k, v)
        q.zero_()
        raise UserError("mine")

    found = p.refusal(fail)
    return p.error(causal) if found == ("UserError", "mine") else found


def an_exception_on_one_rank(p):
    """Nothing at the end waits for the other rank."""

    def fail(q, k, v):
        if p.rank == 1:
            raise UserError("mine")

    return p.error(causal) if p.refusal(fail) == (("UserError", "mine") if p.rank else ("", "")) else float("inf")


def nested(p):
    def inner(q, k, v):
        refused.append(raised(p.context().__enter__))
        return causal(q, k, v)

    refused = []
    error = p.error(inner)
    text = "context_parallel was entered inside context_parallel\n\nhint: leave the outer block before the inner one"
    return error if refused == [("SpecError", text)] else refused


def twice_in_a_row(p):
    return max(
        p.error(causal), p.error(causal, layout="striped"), p.error(F.scaled_dot_product_attention, Mask.full(S))
    )


def other_models_in_between(p):
    other = make_inputs(S - 4, (4, 4), seed=1)
    local = []
    errors = []
    for _ in range(2):
        local.append(causal(*other[:3]))
        errors.append(p.error(causal))
    local.append(causal(*other[:3]))
    return max(errors) if all(torch.equal(x, local[0]) for x in local) else float("inf")


def other_names_are_left_alone(p):
    """What is no attention runs inside as outside."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Softmax(-1)
    ).double()
    layout = Layout.zigzag(S, 2)
    with p.context():
        found = model(p.q[0])
    return relative_error(found, model(p.inputs.q[0][:, torch.from_numpy(layout.positions(p.rank))]))


# Buffers.


def buffers_of_any_shape(p):
    ids = torch.arange(S)
    rows = torch.arange(3 * S).view(3, S)
    freqs = torch.randn(S, 5, dtype=torch.complex64)
    wide = torch.randn(2, S, 3, 4, dtype=torch.bfloat16)
    turned = torch.randn(2, 3, 4, S).movedim(-1, 1)  # a view of another order
    base = torch.arange(2.0 * S)
    strided = base[::2]
    module = torch.nn.Module()
    module.register_buffer("table", torch.randn(S, 2))
    held = (ids, rows, freqs, wide, turned, strided, module.table)
    dims = (0, 1, -2, 1, -3, 0, 0)
    before = [x.clone() for x in (*held, base)]
    places = [(x.data_ptr(), x.stride()) for x in held]
    at = torch.from_numpy(Layout.striped(S, 2).positions(p.rank))
    with context_parallel(p.group, buffers=list(held), buffer_seq_dims=list(dims), layout="striped") as dropin:
        good = all(torch.equal(x, y.index_select(d, at)) for x, y, d in zip(held, before, dims, strict=False))
        good &= module.table.shape == (len(at), 2) and torch.equal(base, before[-1])
        good &= torch.equal(dropin.unshard(rows, -1), before[1])
        for x in held:
            x.zero_()
    good &= all(torch.equal(x, y) for x, y in zip((*held, base), before, strict=True))
    good &= places == [(x.data_ptr(), x.stride()) for x in held]
    return 0.0 if good else float("inf")


def buffers_that_stay_sharded(p):
    with p.context(no_restore_buffers={p.q, p.k}) as dropin:
        p.q += 1
    found = [relative_error(dropin.unshard(p.q, 2) - 1, p.inputs.q), relative_error(dropin.unshard(p.k, 2), p.inputs.k)]
    return max(*found, relative_error(p.v, p.inputs.v))


def refused_buffers(p):
    def context(*buffers, dims=None, **how):
        before = [getattr(x, "shape", None) for x in buffers]
        dims = (0,) * len(buffers) if dims is None else dims
        with_context = context_parallel(p.group, buffers=buffers, buffer_seq_dims=dims, **how)
        text = raised(with_context.__enter__)[1]
        return text if before == [getattr(x, "shape", None) for x in buffers] else "buffers changed"

    ids = torch.arange(S)
    return [
        context(ids, torch.zeros(2, S)),
        context(ids, torch.zeros(S, requires_grad=True)),
        context(torch.zeros(S, requires_grad=True) * 2),
        context(ids, dims=(1,)),
        context(ids, dims=(0, 0)),
        context(ids, ids),
        context(ids, [1]),
        context(ids, no_restore_buffers=[torch.arange(S)]),
        context(ids, mask=Mask.causal(20)),
        context(ids, mask=CAUSAL, seq_len=20),
        context(ids, seq_len=0),
        context(ids, layout="balanced"),
        context(),
        context(ids, layout="spiral"),
        raised(context_parallel(p.group, buffers=ids, buffer_seq_dims=(0,)).__enter__)[1],
        context(ids, mask=torch.ones(S, S)),
    ]


GRADIENT = (
    "requires a gradient, but would get only the gradient of a shard\n\n"
    "hint: give x.detach() and call requires_grad_() inside; or shard x by DropIn.shard instead"
)
ONCE = "\n\nhint: give the global tensor; this tensor may be sharded already, or have its sequence in another dim"
REFUSED_BUFFERS = [
    "dim 0 of a tensor of shape (2, 21) has 2 rows; the sequence has 21 tokens" + ONCE,
    f"buffer 1 of shape (21,) {GRADIENT}",
    f"buffer 0 of shape (21,) {GRADIENT}",
    "dim 1 does not exist in buffer 0 of shape (21,)",
    "1 buffers but 2 buffer_seq_dims\n\nhint: give one dim for each buffer",
    "buffers holds one tensor twice\n\nhint: give each tensor once",
    "buffer 1 is a list, not a tensor",
    "no_restore_buffers holds a tensor that is not in buffers\n\nhint: add the tensor to buffers",
    "dim 0 of a tensor of shape (21,) has 21 rows; the sequence has 20 tokens" + ONCE,
    "seq_len=20, but the mask covers 21 tokens\n\nhint: leave seq_len out",
    "seq_len=0: a mask covers at least one token",
    "layout 'balanced' is computed from a mask, and buffers are sharded before the first attention call\n\n"
    'hint: set mask=, such as Mask.documents(lengths); or layout="zigzag"',
    "no sequence length: there are no buffers and no mask\n\nhint: set seq_len to the global length",
    f"layout 'spiral' is not known\n\nhint: choose one of {', '.join(LAYOUTS)}",
    "buffers is a single tensor\n\nhint: give a tuple of tensors, such as (ids,)",
    "mask is a Tensor\n\nhint: give a longspan.Mask, or a dense one to SDPA",
]


def no_buffers(p):
    """Shards that the program makes for itself, and the gradients of what they were made of."""
    leaves = [x.clone().requires_grad_() for x in p.inputs[:3]]
    with context_parallel(p.group, seq_len=S) as dropin:
        out = causal(*(dropin.shard(x, 2) for x in leaves))
        out.backward(dropin.shard(p.inputs.dout, 2))
    wanted = dense_attention(p.inputs, CAUSAL)
    errors = [relative_error(dropin.unshard(out, 2), wanted.out)]
    # Each rank has the gradients of its own tokens; the rest is 0.
    errors += [
        relative_error(dropin.unshard(dropin.shard(x.grad, 2), 2), g) for x, g in zip(leaves, wanted[1:4], strict=True)
    ]
    return max(errors)


def differ(p):
    """The ranks were given different things."""
    other = torch.zeros(S, 2 + p.rank)
    short = torch.arange(S if p.rank == 0 else S - 1)
    found = [
        raised(context_parallel(p.group, buffers=(other,), buffer_seq_dims=(0,)).__enter__)[1],
        raised(context_parallel(p.group, seq_len=S, layout=("zigzag", "striped")[p.rank]).__enter__)[1],
        raised(context_parallel(p.group, buffers=(p.q, short), buffer_seq_dims=(2, 0)).__enter__)[1],
        p.refusal(lambda *x: F.scaled_dot_product_attention(*x, is_causal=p.rank == 0))[1],
    ]
    return [text.split("\n")[0] for text in found]


GIVEN = "the ranks of one context-parallel group were given different "
TOO_SHORT = "dim 0 of a tensor of shape (20,) has 20 rows; the sequence has 21 tokens"
DIFFER = {
    rank: [
        GIVEN + "buffers: rank 1 differ from rank 0",
        GIVEN + "layouts, masks or routes: rank 1 differ from rank 0",
        TOO_SHORT if rank else "rank 1 failed: " + TOO_SHORT,
        GIVEN + "plans: rank 1 differ from rank 0",
    ]
    for rank in range(2)
}

# Gradients.


class Model(torch.nn.Module):
    """Everything that backward may want of a buffer: ids of an embedding, a table that is multiplied, q itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.double()

    def forward(self, ids, table, attend=causal):
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(2, 3)
        return attend(q * table, k * table, v)


def loss_and_gradients(p, when, attend=causal):
    """How far weights' gradients are, with backward inside the context or after it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 7, (2, S), generator=generator)
    table, weights = (torch.randn(S, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    wanted, model = Model(), Model()
    (wanted(ids, table) * weights).sum().backward()
    with context_parallel(p.group, buffers=(ids, table, weights), buffer_seq_dims=(1, 0, 0)):
        loss = (model(ids, table, attend) * weights).sum()
        if when == "inside":
            loss.backward()
    if when == "after":
        loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, group=p.group)
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(relative_error(x.grad, y.grad) for x, y in pairs)


def backward_inside(p):
    return loss_and_gradients(p, "inside")


def backward_after(p):
    return loss_and_gradients(p, "after")


def buffers_that_are_leaves(p):
    """PyTorch's own test does so: gradients are wanted of the shards."""
    wanted = dense_attention(p.inputs, CAUSAL)
    dout = p.inputs.dout.clone()
    held = (p.q, p.k, p.v, dout)
    with context_parallel(p.group, buffers=held, buffer_seq_dims=(2,) * 4) as dropin:
        leaves = [x.requires_grad_() for x in held[:3]]
        causal(*leaves).backward(dout)
    grads = [dropin.unshard(x.grad, 2) for x in leaves]
    return max(*(relative_error(x, y) for x, y in zip(grads, wanted[1:4], strict=True)), p.changed)


def leaves_made_inside(p):
    wanted = dense_attention(p.inputs, CAUSAL)
    with p.context() as dropin:
        leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        out = causal(*leaves)
    out.backward(dropin.shard(p.inputs.dout, 2))
    return max(relative_error(dropin.unshard(x.grad, 2), y) for x, y in zip(leaves, wanted[1:4], strict=True))


def compiled_with_gradients(p):
    torch._dynamo.reset()
    return loss_and_gradients(p, "inside", torch.compile(causal, backend="aot_eager"))


def recomputed_inside(p):
    return loss_and_gradients(p, "inside", lambda *x: checkpoint(causal, *x, use_reentrant=False))


def recomputed_after(p):
    found = raised(loss_and_gradients, p, "after", lambda *x: checkpoint(causal, *x, use_reentrant=False))
    return found[0], found[1].split("\n")[0]


def recomputed_by_reentrance(p):
    return raised(loss_and_gradients, p, "inside", lambda *x: checkpoint(causal, *x, use_reentrant=True))


def written_to_before_backward(p):
    """PyTorch does not watch for this where tensors are saved by hooks, as they are inside."""
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def run():
        with p.context():
            scale = p.q.new_ones(8)
            loss = (causal(p.q, p.k, p.v) * weight * scale).sum()
            scale.add_(1)
        loss.backward()

    return raised(run)


def saved_before(p):
    """A graph from before the context, that needs a buffer."""
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    loss = (p.q * weight).sum()
    with p.context():
        found = raised(loss.backward)
    return found[0], "modified by an inplace operation" in found[1]


def higher_derivatives_of_the_rest(p):
    x = torch.tensor(3.0, requires_grad=True)
    with p.context():
        (first,) = torch.autograd.grad(x**3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    return abs(second.item() - 18)


RIGHT = [
    functional, a_name_imported_before, keywords, torch_ops, torch_ops_overload, torch_c, another_backend_chosen, exported,
    compiled_inside, compiled_before, compiled_by_inductor_before, torch_script, layers_of_torch, a_thread_of_other_work,
    options, other_numbers_of_dims, autocast, dense_masks, a_mask_that_is_written_to, a_mask_of_the_context,
    layouts_and_routes, an_exception_of_the_user, an_exception_on_one_rank, nested, twice_in_a_row, other_models_in_between,
    other_names_are_left_alone, buffers_of_any_shape, buffers_that_stay_sharded, no_buffers, backward_inside, backward_after,
    buffers_that_are_leaves, leaves_made_inside, compiled_with_gradients, recomputed_inside, higher_derivatives_of_the_rest,
]  # fmt: skip
WITH_WEIGHTS = hidden("multi_head_attention_forward with need_weights=True", "set need_weights=False")
OTHERS = ["flex_attention"] * 2 + ["aten._scaled_dot_product_flash_attention_for_cpu.default"]
BY_HAND = (
    "SpecError",
    "aten.bmm multiplies one rank's tokens, not the 21 of the sequence\n\n"
    "hint: call torch.nn.functional.scaled_dot_product_attention; or set "
    'allow_local=("matmul",) if its dim is not the sequence',
)
OWN = hidden(
    "scaled_dot_product_attention in a custom operator, or in another thread,",
    "call attention from the thread that opened the block, outside custom operators",
)
KERNEL = hidden(
    "aten._scaled_dot_product_flash_attention_for_cpu.default in a custom operator, or in another thread,",
    "call attention from the thread that opened the block, outside custom operators",
)
NO_HOOKS = (
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. "
    "Please open an issue with your use case."
)
RECOMPUTED = "A different number of tensors was saved during the original forward and recomputation."
REENTRANT = (
    "reentrant checkpointing recomputes attention in backward, when context_parallel may have ended\n\n"
    "hint: set use_reentrant=False"
)
WRITTEN_TO = (
    "a tensor of shape (8,) that backward needs has been modified by an inplace operation: "
    "it is at version 1, expected version 0"
)
WRONG = [
    (attention_with_weights, [WITH_WEIGHTS] * 2),
    (other_attention, [*map(hidden, OTHERS), BY_HAND]),
    (an_operator_of_ones_own, OWN),
    (a_thread_started_inside, OWN),
    (a_kernel_out_of_sight, [KERNEL] * 2),
    (a_thread_from_before, [text.split("\n")[0] for _, text in (OWN, OWN, KERNEL)]),
    (higher_order, hidden("cond")),
    (transformed, [BY_HAND, ("RuntimeError", NO_HOOKS)]),
    (refused_arguments, REFUSED),
    (lengths, LENGTHS),
    (refused_buffers, REFUSED_BUFFERS),
    (differ, DIFFER),
    (recomputed_after, ("CheckpointError", f"torch.utils.checkpoint: {RECOMPUTED}")),
    (recomputed_by_reentrance, ("SpecError", REENTRANT)),
    (written_to_before_backward, ("RuntimeError", WRITTEN_TO)),
    (saved_before, ("RuntimeError", True)),
]


def _run(group, rank, program):
    return program(Program(group, rank))


@pytest.mark.parametrize("program", RIGHT)
def test_right(program):
    errors = run_ranks(2, _run, program)
    assert all(isinstance(error, float) and error < 1e-10 for error in errors), errors


@pytest.mark.parametrize(("program", "expected"), WRONG)
def test_refused(program, expected):
    for rank, found in enumerate(run_ranks(2, _run, program)):
        assert found == (expected[rank] if isinstance(expected, dict) else expected)


def _few_tokens_and_two_axes(group, rank):
    inputs = make_inputs(3, (4, 2))
    wanted = dense_attention(inputs, Mask.causal(3))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    errors = []
    for place, route in ((group, "ring"), (group, "ulysses"), (mesh, "usp")):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        with context_parallel(place, seq_len=3, route=route) as dropin:
            local = [dropin.shard(x, 2) for x in leaves]
            out = F.scaled_dot_product_attention(*local, is_causal=True, enable_gqa=True)
            out.backward(dropin.shard(inputs.dout, 2))
        errors.append(relative_error(dropin.unshard(out, 2), wanted.out))
        errors += [
            relative_error(dropin.shard(x.grad, 2), dropin.shard(y, 2))
            for x, y in zip(leaves, wanted[1:4], strict=True)
        ]
    return max(errors)


def test_fewer_tokens_than_ranks_and_a_mesh_of_two_axes():
    assert max(run_ranks(4, _few_tokens_and_two_axes)) < 1e-10


def test_one_rank_without_a_group():
    assert _run(None, 0, functional) < 1e-10


# The guide.


def _guide(group, rank, blocks):
    exec("".join(blocks), {})
    return True


def test_the_python_of_the_guide_runs():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 3
    assert run_ranks(2, _guide, blocks) == [True] * 2
