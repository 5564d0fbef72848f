"""Adapters of the peers: each builds a peer for one input and group, and returns the function to call.

No adapter fixes a peer: the benchmark reports a wrong result. Peers are imported when built, since the SDPA process needs none.
"""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import kernels
from benchmarks.peers.cases import Case
from longspan import Layout, attention, plan_attention

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Build = Callable[[Case, dist.ProcessGroup], Attend]


def make_layout(name: str, case: Case, ranks: int) -> Layout:
    """Return the layout `name`; "balanced" is made from the mask."""
    return Layout.balanced(case.mask, ranks) if name == "balanced" else Layout.named(name, case.seq_len, ranks)


def longspan_route(route: str, layout: str) -> Build:
    def build(case: Case, group: dist.ProcessGroup) -> Attend:
        made = make_layout(layout, case, group.size())
        plan = plan_attention(made, case.mask, route=route, heads=(case.heads, case.kv_heads))
        return lambda q, k, v: attention(q, k, v, plan=plan, group=group)

    return build


def deepspeed_distributed(local: Callable[[Case], kernels.Local]) -> Build:
    def build(case: Case, group: dist.ProcessGroup) -> Attend:
        _init_deepspeed()
        from deepspeed.sequence.layer import DistributedAttention

        attend = local(case)

        def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        module = DistributedAttention(inner, group, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: module(q, k, v, 0)

    return build


def deepspeed_hf(case: Case, group: dist.ProcessGroup) -> Attend:
    _init_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    local = kernels.local_attention(case)

    def flash_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return local(q, k, v).transpose(1, 2).contiguous(), None

    ranks, rank = group.size(), group.rank()
    attention = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward if case.kind == "causal" else flash_attention,
        batch_size=1,
        attn_head_count=case.heads,
        attn_head_size=case.head_dim,
        kv_head_count=case.kv_heads,
        num_hidden_layers=1,
        process_group=group,
        local_seq_length=case.seq_len // ranks,
        global_seq_length=case.seq_len,
    )
    positions = torch.cat([torch.arange(length) for length in case.lengths])[None].chunk(ranks, dim=1)[rank]
    module = _layer(case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = attention(module, q, k, v, None, position_ids=positions)
        return out.unflatten(2, (case.heads, case.head_dim))

    return attend


def _init_deepspeed() -> None:
    import deepspeed.comm
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    if not deepspeed.comm.is_initialized():
        with redirect_stdout(sys.stderr):  # stdout is for the table only
            deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def _layer(case: Case) -> Any:
    """Return a stand-in for the layer, with the attributes that Hugging Face attention functions read."""
    return SimpleNamespace(
        training=True,
        is_causal=True,
        num_key_value_groups=case.heads // case.kv_heads,
        sliding_window=case.window,
    )


def para_attn(case: Case, group: dist.ProcessGroup) -> Attend:
    from para_attn import ulysses_attn_func

    if case.kind == "causal" and case.heads == case.kv_heads:
        return lambda q, k, v: ulysses_attn_func(q, k, v, is_causal=True, mesh=group)
    local = kernels.local_attention(case)
    return lambda q, k, v: ulysses_attn_func(q, k, v, mesh=group, attn_func=lambda q, k, v, **_: local(q, k, v))


def torch_template(rotate: str) -> Build:
    def build(case: Case, group: dist.ProcessGroup) -> Attend:
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            set_rotate_method(rotate)  # a module global that differs between two peers here
            return _Template.apply(q, k, v, group)

        return attend

    return build


class _Template(torch.autograd.Function):
    """PyTorch's forward and backward templates as one function: PyTorch's dispatch has only CUDA operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel._attention import _templated_ring_attention

        op = kernels.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _templated_ring_attention(group, 2, op, q, k, v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        op = kernels.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        grads = _attention._templated_ring_attention_backward(
            ctx.group, 2, op, dout, "grad_out", q, k, v, out, lse, is_causal=True, dropout_p=0.0
        )
        return *grads[:3], None


def yunchang_ulysses(case: Case, group: dist.ProcessGroup) -> Attend:
    with kernels.flash_attn_stand_in():
        from yunchang import UlyssesAttention
        from yunchang.kernels import AttnType

        module = UlyssesAttention(group, attn_type=AttnType.FA)
    return lambda q, k, v: module(q, k, v, causal=True, window_size=_flash_window(case))


def yunchang_ring(kind: str) -> Build:
    def build(case: Case, group: dist.ProcessGroup) -> Attend:
        with kernels.flash_attn_stand_in():
            from yunchang import LongContextAttention, set_seq_parallel_pg
            from yunchang.kernels import AttnType
        set_seq_parallel_pg(1, group.size(), group.rank(), group.size())
        module = LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA)
        return lambda q, k, v: module(q, k, v, causal=True, window_size=_flash_window(case))

    return build


def _flash_window(case: Case) -> tuple[int, int]:
    return (-1, -1) if case.window is None else (case.window - 1, 0)


def ringmaster(backend: str, rotate: str = "allgather", balance: str = "none") -> Build:
    def build(case: Case, group: dist.ProcessGroup) -> Attend:
        import ringmaster as rm
        from ringmaster.strategies.ring import make_ring_attention
        from ringmaster.strategies.ulysses import make_ulysses_attention
        from torch.distributed.device_mesh import DeviceMesh

        config = rm.RingmasterConfig(
            size=group.size(),
            backend=rm.Backend(backend),
            rotate_method=rm.RotateMethod(rotate),
            load_balance=rm.LoadBalance(balance),
        )
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        runtime = rm.setup(config, num_kv_heads=case.kv_heads, device_mesh=mesh, device_type="cpu", inner_attn="sdpa")
        if case.kind == "packed":
            edges = torch.tensor([0, *case.lengths]).cumsum(0, dtype=torch.int32)
            runtime.varlen = (edges, max(case.lengths))
        if backend == "ulysses":
            function = make_ulysses_attention("sdpa")
        else:
            function = make_ring_attention("math", "math", config.rotate_method)
        layer = _layer(case)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rm.runtime.set_runtime(runtime)  # one per process, but several peers here need separate ones
            return function(layer, q, k, v, None, is_causal=True)[0]

        return attend

    return build


def lucidrains_ring(case: Case, group: dist.ProcessGroup) -> Attend:
    from ring_attention_pytorch import ring_flash_attn

    theirs, ours = _interleaved_heads(case)
    bucket = min(1024, case.seq_len // group.size())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_flash_attn(
            q if theirs is None else q[:, :, theirs], k, v,
            causal=True, bucket_size=bucket, ring_reduce_col=True, max_lookback_seq_len=case.window,
            ring_size=group.size(),
        )  # fmt: skip
        return out if ours is None else out[:, :, ours]

    return attend


def lucidrains_zigzag(case: Case, group: dist.ProcessGroup) -> Attend:
    from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

    theirs, ours = _interleaved_heads(case)
    layout = Layout.zigzag(case.seq_len, group.size())
    positions = [torch.from_numpy(layout.positions(rank)) for rank in range(group.size())]
    visible = torch.from_numpy(case.mask.dense())[positions[group.rank()]][:, torch.cat(positions)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = zig_zag_attn(q if theirs is None else q[:, theirs], k, v, attn_mask=visible)
        return out if ours is None else out[:, ours]

    return attend


def _interleaved_heads(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """Return the order of query heads in which head `i` uses KV head `i % kv_heads`, and its inverse; None without GQA."""
    if case.heads == case.kv_heads:
        return None, None
    theirs = torch.arange(case.heads).view(case.kv_heads, -1).T.flatten()
    return theirs, theirs.argsort()
