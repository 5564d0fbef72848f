"""The census on real ranks: what each kind of call counts for, by hand, whoever makes it, and what its groups are called."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from benchmarks.census import Counts, census
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from longspan.comm.meshes import Meshes
from longspan.comm.row_exchange import exchange_rows
from longspan.comm.traffic import record
from longspan.cp.attention import attention
from longspan.plan import Layout, Mask, plan_attention
from longspan.topology import Topology
from tests.ranks import run_ranks


def _kinds(group, rank):
    """Six elements of four bytes on three ranks, by every call of c10d that we know."""
    x, wide, work = torch.ones(6), torch.ones(18), []
    with census(Meshes.of(Topology(dp=3), "cpu")) as traffic:
        dist.all_reduce(x)
        dist.all_gather_single(wide, x)
        dist.all_gather([torch.empty(6) for _ in range(3)], x)
        dist.reduce_scatter_single(x, wide)
        dist.all_to_all_single(torch.empty(6), x)
        # One row to rank 0, two to rank 1, three to rank 2, of two elements each.
        dist.all_to_all_single(torch.empty(3 * (rank + 1), 2), torch.ones(6, 2), [rank + 1] * 3, [1, 2, 3])
        dist.broadcast(x, 1)
        dist.gather(x, [torch.empty(6) for _ in range(3)] if rank == 1 else None, dst=1)
        dist.scatter(x, list(wide.split(6)) if rank == 1 else None, src=1)
        dist.reduce(x, 1)
        work.append(dist.isend(x, (rank + 1) % 3))
        dist.recv(torch.empty(6), (rank - 1) % 3)
        dist.barrier()
        functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
        functional.wait_tensor(functional.all_gather_single(x, 0, dist.group.WORLD))
        functional.wait_tensor(functional.reduce_scatter_single(wide, "sum", 0, dist.group.WORLD))
        functional.wait_tensor(functional.all_to_all_single(x, None, None, dist.group.WORLD))
    for each in work:
        each.wait()
    assert all(sent.counts.bytes_sent == 4 * sent.counts.elements_sent for sent in traffic)
    return [(sent.axis, sent.kind, sent.counts.elements_sent) for sent in traffic]


def test_every_kind_of_call():
    for rank, calls in enumerate(run_ranks(3, _kinds)):
        root, other = 12 * (rank == 1), 6 * (rank != 1)
        assert calls == [
            ("dp", "all-reduce", 8),
            ("dp", "all-gather", 12),
            ("dp", "all-gather", 12),
            ("dp", "reduce-scatter", 12),
            ("dp", "all-to-all", 4),
            ("dp", "all-to-all", 2 * (6 - (rank + 1))),
            ("dp", "broadcast", root),
            ("dp", "gather", other),
            ("dp", "scatter", root),
            ("dp", "gather", other),
            ("dp", "send", 6),
            ("dp", "all-reduce", 8),
            ("dp", "all-gather", 12),
            ("dp", "reduce-scatter", 12),
            ("dp", "all-to-all", 4),
        ]


def _fractions(group, rank):
    with census(Meshes.of(Topology(dp=3), "cpu")) as traffic:
        dist.all_reduce(torch.ones(()))
        dist.all_reduce(torch.ones((), dtype=torch.float64))
    return traffic.by_kind


def test_parts_of_an_element_are_exact():
    for by_kind in run_ranks(3, _fractions):
        assert by_kind == {("dp", "all-reduce"): Counts(2, Fraction(8, 3), Fraction(16))}


def _names(group, rank):
    meshes = Meshes.of(Topology(dp=2, tp=2, cp=2), "cpu")
    x = torch.ones(4)
    with census(meshes) as traffic:
        for axis in ("tp", "cp", "dp", "pp"):
            dist.all_reduce(x, group=meshes.data[axis].get_group())
        dist.all_reduce(x, group=meshes.tokens)
        dist.all_reduce(x, group=meshes.weights["shard"].get_group())
        dist.all_reduce(x)
        exchange_rows(torch.ones(4, 1), [2, 2], [2, 2], meshes.data["dp"].get_group())
    return [sent.axis for sent in traffic]


def test_groups_are_named_by_the_axes_along_which_their_ranks_differ():
    """A group of one rank is none; rows on their way to experts have an axis of their own."""
    assert run_ranks(8, _names) == [["tp", "cp", "dp", "tp-cp", "dp-cp", "world", "ep"]] * 8


def _dtensor(group, rank):
    meshes = Meshes.of(Topology(dp=1, tp=2), "cpu")
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    with census(meshes) as traffic:
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        whole.sum().backward()
    return traffic.by_issuer, [sent.kind for sent in traffic]


def test_dtensor_forward_and_backward():
    """Four elements a rank: gathered, and scattered again in backward."""
    for by_issuer, kinds in run_ranks(2, _dtensor):
        assert by_issuer == {("tp", "torch.distributed.tensor"): Counts(2, Fraction(8), Fraction(32))}
        assert kinds == ["all-gather", "reduce-scatter"]


def _attention(group, rank, recompute):
    plan = plan_attention(Layout.zigzag(32, 2), Mask.causal(32))
    q, k, v = (torch.ones(1, 2, 16, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return attention(q, k, v, plan=plan, group=group)

    with census(Meshes.of(Topology(dp=1, cp=2), "cpu")) as traffic, record() as calls:
        out = checkpoint(attend, q, k, v, use_reentrant=False) if recompute else attend(q, k, v)
        out.sum().backward()
    return traffic.by_kind["cp", "send"], [call.bytes_sent for call in calls]


@pytest.mark.parametrize("recompute", [False, True])
def test_hops_inside_the_registered_operators(recompute):
    for sent, own in run_ranks(2, _attention, recompute):
        assert len(own) == 2 + recompute
        assert sent.bytes_sent == sum(own) > 0


def _unknown(group, rank):
    library = torch.library.Library("_dtensor", "FRAGMENT")
    library.define("new_collective(Tensor x) -> Tensor")
    library.impl("new_collective", lambda x: x, "CPU")
    with census(Meshes.of(Topology(dp=2), "cpu")), pytest.raises(NotImplementedError, match="new_collective is a coll"):
        torch.ops._dtensor.new_collective(torch.ones(1))


def test_what_is_not_known_is_an_error():
    run_ranks(2, _unknown)
