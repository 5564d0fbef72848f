"""Bytes and pairs measured apart from our own counters: at the backend's sends, at the kernels' arguments, at the sockets."""

from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from benchmarks.harness import tcp_bytes_sent

from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.kernels import sdpa
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import dense_attention, make_inputs, relative_error
from tests.plan.strategies import NAMES, inners_of
from tests.ranks import run_ranks

ALL_TO_ALL = ("all_to_all_single", "alltoall_base")
NOT_TRAFFIC = {"rank", "size", "name", "boxed", "unbox", "abort", "shutdown", "split_group", "merge_remote_group"}


@contextmanager
def watched(seen: Counter):
    """Count what the process group itself is given: bytes to send and to fill under "sent" and "received", and every call of a
    method that talks to others by its name."""
    group_type = dist.ProcessGroup
    # The descriptors themselves: what `getattr` gives would not bind again.
    kept = {
        name: method for name, method in group_type.__dict__.items()
        if callable(method) and not name.startswith("__") and not name.startswith(("_get", "_set", "get_", "set_", "_pybind"))
        and not isinstance(method, type) and name not in NOT_TRAFFIC
    }  # fmt: skip
    assert {"send", "recv", ALL_TO_ALL[0], "allgather", "barrier", "reduce_scatter"} <= set(kept)

    def counted(name):
        def call(self, *arguments, **keywords):
            seen[name] += 1
            if name in ("send", "recv"):
                seen["sent" if name == "send" else "received"] += sum(tensor.nbytes for tensor in arguments[0])
            elif name in ALL_TO_ALL:
                filled, given, fill_sizes, give_sizes = arguments[:4]
                # Nothing goes to oneself, so that all of it travels.
                assert fill_sizes[self.rank()] == give_sizes[self.rank()] == 0
                assert (sum(fill_sizes), sum(give_sizes)) == (filled.numel(), given.numel())
                seen["sent"] += given.nbytes
                seen["received"] += filled.nbytes
            return kept[name].__get__(self)(*arguments, **keywords)

        return call

    for name in kept:
        setattr(group_type, name, counted(name))
    try:
        yield seen
    finally:
        for name, method in kept.items():
            setattr(group_type, name, method)


class CountingAten:
    """`torch.ops.aten` that counts the pairs of each flash call, on each query head, by the arguments it is given."""

    def __init__(self):
        self.pairs = []

    def _count(self, q, k, causal, mask):
        rows, columns = q.shape[2], k.shape[2]
        if mask is not None:
            assert not causal
            assert mask.shape == (rows, columns)
            pairs = int((mask == 0).sum())
        else:
            assert not causal or rows == columns
            pairs = rows * (rows + 1) // 2 if causal else rows * columns
        self.pairs.append(pairs * q.shape[1])

    def _scaled_dot_product_flash_attention_for_cpu(self, q, k, v, dropout, causal, attn_mask=None, scale=None):
        self._count(q, k, causal, attn_mask)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q, k, v, dropout, causal, attn_mask=attn_mask, scale=scale)

    def _scaled_dot_product_flash_attention_for_cpu_backward(
        self, dout, q, k, v, out, lse, dropout, causal, attn_mask=None, scale=None
    ):
        self._count(q, k, causal, attn_mask)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(dout, q, k, v, out, lse, dropout, causal, attn_mask=attn_mask, scale=scale)


class Measured(NamedTuple):
    phase: str
    sent: int
    received: int
    planned: int
    pairs: float
    kernel_calls: int
    called: dict[str, int]


def _measured(group, rank, plans, dtype):
    found = []
    for plan in plans:
        num_q, _ = plan.heads
        q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in make_inputs(plan.seq_len, plan.heads, 2, dtype=dtype))
        for x in (q, k, v):
            x.requires_grad_()
        kept = sdpa.aten
        with record() as calls:
            for phase in ("forward", "backward"):
                sdpa.aten = aten = CountingAten()
                try:
                    with watched(Counter()) as seen:
                        if phase == "forward":
                            out = attention(q, k, v, plan=plan, group=group)
                        else:
                            out.backward(dout)
                finally:
                    sdpa.aten = kept
                called = {name: n for name, n in seen.items() if name not in ("sent", "received")}
                planned = 2 * plan.bytes(rank, phase, 8, q.itemsize)
                found.append(
                    Measured(
                        phase, seen["sent"], seen["received"], planned, sum(aten.pairs) / num_q, len(aten.pairs), called
                    )
                )
        heads = plan.rank_plan(rank).heads
        for m, call in zip(found[-2:], calls, strict=True):
            assert (call.bytes_sent, call.bytes_received) == (m.sent, m.received), (plan.route, m, call)
            assert (call.pairs, call.blocks) == (m.pairs, plan.blocks(rank)), (plan.route, m, call)
            # Heads of which KV heads serve unequally many are a kernel call for each run of equal ones.
            assert m.kernel_calls == call.kernel_calls * (1 if heads is None else len(heads.blocks)), (
                plan.route,
                m,
                call,
            )
            posted = sum(m.called.get(name, 0) for name in ALL_TO_ALL)
            assert posted == call.collectives, (plan.route, m, call)
            if not posted:
                assert m.called.get("send", 0) == call.messages_sent, (plan.route, m, call)
    return found


def measured_routes(P) -> list[tuple[str, int | None]]:
    routes = ("ring", "rotate", "allgather", "exchange", "ulysses", "usp", "exchange-ulysses", "ulysses-ring")
    return [(route, n) for route in routes for n in inners_of(route, P) if n is None or 1 < n < P or P == 3]


@pytest.mark.parametrize(
    ("P", "dtype"),
    [
        (3, torch.bfloat16),
        *((P, torch.float32) for P in (2, 3, 4)),
        *(pytest.param(P, torch.bfloat16, marks=pytest.mark.nightly) for P in (2, 4)),
    ],
    ids=str,
)
def test_messages_and_kernel_calls_are_those_of_the_plan(P, dtype):
    S, heads = 300, (12, 6)
    masks = [Mask.causal(S), Mask.full(S), Mask.documents([120, 0, 180], window=50), Mask.prefix(S, 70)]
    plans = [
        plan_attention(Layout.named(name, S, P), mask, route, heads, inner)
        for route, inner in measured_routes(P) for n, name in enumerate(NAMES) for m, mask in enumerate(masks)
        if route == "ring" or m % 3 == n
    ]  # fmt: skip
    by_rank = run_ranks(P, _measured, plans, dtype)
    for n, plan in enumerate(plans):
        for offset, phase in enumerate(("forward", "backward")):
            rows = [found[2 * n + offset] for found in by_rank]
            place = (plan.route, plan.layout.name, phase, rows)
            assert {row.phase for row in rows} == {phase}
            assert [row.sent for row in rows] == [row.planned for row in rows], place
            assert [row.pairs for row in rows] == [plan.area(rank) for rank in range(P)], place
            assert sum(row.sent for row in rows) == sum(row.received for row in rows), place
            if plan.degrees.heads == 1 and phase == "forward":
                hidden_size = 2 * 2 * heads[1] * 8 * dtype.itemsize
                assert [row.received for row in rows] == [
                    plan.rows_received(rank) * hidden_size for rank in range(P)
                ], place


def _whole_documents(group, rank, routes):
    layout, mask = Layout.contiguous(64, 4), Mask.documents([5, 11, 16, 8, 8, 16])
    found = {}
    for route in routes:
        plan = plan_attention(layout, mask, route, (4, 2))
        q, k, v, dout = (shard(x, layout, rank, 2) for x in make_inputs(64))
        for x in (q, k, v):
            x.requires_grad_()
        with watched(Counter()) as forward, record() as calls:
            out = attention(q, k, v, plan=plan, group=group)
        with watched(Counter()) as backward:
            out.backward(dout)
        want = dense_attention(make_inputs(64), mask)
        assert relative_error(out.detach(), shard(want.out, layout, rank, 2)) < 1e-12
        assert relative_error(k.grad, shard(want.dk, layout, rank, 2)) < 1e-12
        found[route] = dict(forward), dict(backward), calls[0].messages_sent + calls[0].collectives
    return found


def test_documents_that_stay_whole_call_nothing_but_the_comparison_of_the_ranks():
    """0 bytes and no message; no collective but the one all-gather by which the ranks of a call compare what they were given."""
    routes = ("exchange", "ring", "rotate", "allgather", "ulysses", "usp", "ulysses-ring")
    for found in run_ranks(4, _whole_documents, routes):
        for route, (forward, backward, posted) in found.items():
            assert len(forward) == 1, (route, forward)
            assert forward in ({"all_gather_single": 1}, {"_allgather_base": 1}), (route, forward)
            assert backward == {}, (route, backward)
            assert posted == 0, route


def _at_the_sockets(group, rank, plan, backward, dim):
    q, k, v, dout = (
        shard(x, plan.layout, rank, 2) for x in make_inputs(plan.seq_len, plan.heads, dim=dim, dtype=torch.float32)
    )
    for x in (q, k, v):
        x.requires_grad_()
    with record() as calls:
        out = attention(q, k, v, plan=plan, group=group)
        dist.barrier()  # what was handed to the kernel may leave later: all of it is where it goes when all are here
        before = tcp_bytes_sent()
        if backward:
            out.backward(dout)
        else:
            attention(q, k, v, plan=plan, group=group)
        dist.barrier()
        after = tcp_bytes_sent()
    return after - before, calls[1].bytes_sent, calls[1].rows_received


@pytest.mark.parametrize("backward", [False, True])
def test_zigzag_of_eight_at_the_sockets(backward):
    S, P = 8192, 8
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), heads=(2, 2))
    results = run_ranks(P, _at_the_sockets, plan, backward, 64)
    for rank, (at_sockets, counted, rows) in enumerate(results):
        assert counted == plan.bytes(rank, "backward" if backward else "forward", 64, 4) > 1_000_000
        assert rows == plan.rows_received(rank)
        # gloo adds a header to each message.
        assert counted <= at_sockets <= 1.03 * counted + 10_000
    plain = P * (P - 1) * S // P
    assert sum(rows for _, _, rows in results) == 0.75 * plain
    if not backward:
        assert sum(counted for _, counted, _ in results) == 0.75 * plain * (2 * 2 * 64 * 4)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("route", ["exchange", "rotate", "ulysses", "usp"])
def test_other_routes_at_the_sockets(route, backward):
    S, P, dim = 4096, 4, 32
    inner = 2 if route == "usp" else None
    plan = plan_attention(Layout.zigzag(S, P), Mask.causal(S), route, (8, 4), inner)
    for rank, (at_sockets, counted, _) in enumerate(run_ranks(P, _at_the_sockets, plan, backward, dim)):
        assert counted == plan.bytes(rank, "backward" if backward else "forward", dim, 4) > 1_000_000
        assert counted <= at_sockets <= 1.03 * counted + 10_000, (route, rank)
