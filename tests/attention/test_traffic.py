"""Bytes and pairs measured apart from our own counters: at the backend's sends, at the kernels' arguments, at the sockets."""

import os
import socket
import struct
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from longspan.attention import sdpa
from longspan.attention.attention import attention
from longspan.comm.sharding import shard
from longspan.comm.traffic import record
from longspan.plan import Layout, Mask, plan_attention
from tests.oracle import make_inputs
from tests.plan.strategies import NAMES
from tests.ranks import run_ranks


@contextmanager
def messages():
    """Bytes that the process group itself is given to send and to fill."""
    seen = {"send": 0, "recv": 0}
    group_type = dist.ProcessGroup
    # The descriptors themselves: what `getattr` gives would not bind again.
    kept = {name: group_type.__dict__[name] for name in seen}

    def counted(name):
        def call(self, tensors, *arguments):
            seen[name] += sum(tensor.nbytes for tensor in tensors)
            return kept[name].__get__(self)(tensors, *arguments)

        return call

    for name in seen:
        setattr(group_type, name, counted(name))
    try:
        yield seen
    finally:
        for name, method in kept.items():
            setattr(group_type, name, method)


class CountingAten:
    """`torch.ops.aten` that counts the pairs of each flash call by the arguments it is given."""

    def __init__(self):
        self.pairs = []

    def _count(self, q, k, causal, mask):
        rows, columns = q.shape[2], k.shape[2]
        if mask is not None:
            assert not causal
            assert mask.shape == (rows, columns)
            self.pairs.append(int((mask == 0).sum()))
        else:
            assert not causal or rows == columns
            self.pairs.append(rows * (rows + 1) // 2 if causal else rows * columns)

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


def _measured(group, rank, plans, heads, dtype):
    found = []
    for plan in plans:
        q, k, v, dout = (shard(x, plan.layout, rank, 2) for x in make_inputs(plan.seq_len, heads, 2, dtype=dtype))
        for x in (q, k, v):
            x.requires_grad_()
        # The first call compares the ranks; the collective is not part of a phase.
        attention(q, k, v, plan=plan, group=group)
        kept = sdpa.aten
        with record() as calls:
            for phase in ("forward", "backward"):
                sdpa.aten = aten = CountingAten()
                try:
                    with messages() as seen:
                        if phase == "forward":
                            out = attention(q, k, v, plan=plan, group=group)
                        else:
                            out.backward(dout)
                finally:
                    sdpa.aten = kept
                planned = 2 * plan.bytes(rank, phase, 8, q.itemsize)
                found.append((phase, seen["send"], seen["recv"], sum(aten.pairs), len(aten.pairs), planned))
        for (*_, sent, received, pairs, times, _), call in zip(found[-2:], calls, strict=True):
            assert (call.bytes_sent, call.bytes_received) == (sent, received)
            assert (call.pairs, call.kernel_calls) == (pairs, times)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("P", [2, 3, 4])
def test_messages_and_kernel_calls_are_those_of_the_plan(P, dtype):
    S = 300
    masks = [Mask.causal(S), Mask.full(S), Mask.documents([120, 0, 180], window=50), Mask.prefix(S, 70)]
    heads = (4, 2)
    plans = [plan_attention(Layout.named(name, S, P), mask, heads=heads) for name in NAMES for mask in masks]
    by_rank = run_ranks(P, _measured, plans, heads, dtype)
    for n, plan in enumerate(plans):
        for offset, phase in enumerate(("forward", "backward")):
            rows = [found[2 * n + offset] for found in by_rank]
            assert {row[0] for row in rows} == {phase}
            assert [row[1] for row in rows] == [row[5] for row in rows]
            assert [row[3] for row in rows] == [plan.area(rank) for rank in range(P)]
            assert sum(row[1] for row in rows) == sum(row[2] for row in rows)
            if phase == "forward":
                width = 2 * 2 * heads[1] * 8 * dtype.itemsize
                assert [row[2] for row in rows] == [plan.rows_received(rank) * width for rank in range(P)]


def tcp_bytes_sent() -> int:
    """Payload that this process's TCP sockets have sent, by the kernel's own count (`struct tcp_info`, Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)
                    total += sent - again
        except OSError:
            continue
    return total


def _at_the_sockets(group, rank, plan, backward):
    q, k, v, dout = (
        shard(x, plan.layout, rank, 2) for x in make_inputs(plan.seq_len, (2, 2), dim=64, dtype=torch.float32)
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
    results = run_ranks(P, _at_the_sockets, plan, backward)
    for rank, (at_sockets, counted, rows) in enumerate(results):
        assert counted == plan.bytes(rank, "backward" if backward else "forward", 64, 4) > 1_000_000
        assert rows == plan.rows_received(rank)
        # gloo adds a header to each message.
        assert counted <= at_sockets <= 1.03 * counted + 10_000
    plain = P * (P - 1) * S // P
    assert sum(rows for _, _, rows in results) == 0.75 * plain
    if not backward:
        assert sum(counted for _, counted, _ in results) == 0.75 * plain * (2 * 2 * 64 * 4)
