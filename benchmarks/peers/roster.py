"""The peers and longspan's routes: the function called, the stand-in for CUDA kernels on a CPU, and unsupported inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.peers import adapters, kernels
from benchmarks.peers.adapters import Attend, Build
from benchmarks.peers.cases import Case
from longspan import Layout
from longspan.names import ROUTES

FLASH = "CPU flash operator"
OURS = "longspan"


@dataclass(frozen=True)
class Peer:
    """One contender. `build(case, group)` returns the function to call on every rank; `refuses(case)` returns a reason or None.

    The function takes this rank's shard of q, k, v and returns the shard of the output, both in the peer's `axes`, "bhtd" or
    "bthd". `stand_in` describes what runs in place of a CUDA kernel.
    """

    name: str
    package: str
    source: str
    build: Build
    refuses: Callable[[Case], str | None] = lambda case: None
    layout: str = "contiguous"
    axes: tuple[str, str] = ("bhtd", "bhtd")
    stand_in: str = ""


def contenders(case: Case, only: str = "") -> list[Peer]:
    """Return longspan's single-level routes, and the peers selected by `only`."""
    routes = [route for route in ROUTES if route not in ("auto", "upipe", "usp") and "-" not in route]
    ours = [(f"{OURS} {route}", route, _our_layout(route, case)) for route in routes]
    return [
        Peer(name, OURS, f"longspan.attention, route {route!r}", adapters.longspan_route(route, layout), layout=layout)
        for name, route, layout in ours
    ] + named(only)


def named(words: str) -> list[Peer]:
    """Return the peers whose name contains one of `words`, separated by commas."""
    return [peer for peer in PEERS if any(word.strip().lower() in peer.name.lower() for word in words.split(","))]


def _our_layout(route: str, case: Case) -> str:
    """Return the best layout. "ulysses" needs no balancing: each rank computes complete sequences of a share of the heads."""
    if route == "ulysses":
        return "contiguous"
    if case.kind == "causal":
        return "zigzag"
    return "balanced" if hasattr(Layout, "balanced") else "contiguous" if case.kind == "window" else "zigzag"


def _only(*kinds: str, why: str) -> Callable[[Case], str | None]:
    return lambda case: None if case.kind in kinds else why


def _never(why: str) -> Callable[[Case], str | None]:
    return lambda case: why


def _not_built(case: Case, group: dist.ProcessGroup) -> Attend:
    raise AssertionError("a peer that refuses every input must not be built")


_RINGMASTER_P2P = "point-to-point rotation takes no window; documents take its all-gather path, which is listed"
_WINDOWS = f"{FLASH}, per document and 128 rows at a time, as the local attention"
_RINGS = "PyTorch's template has no window and no documents; its FlexAttention path has no backward on CPU"
_ULYSSES_FA = "takes no document boundaries"

PEERS = [
    Peer(
        "DeepSpeed DistributedAttention", "deepspeed", "deepspeed.sequence.layer.DistributedAttention",
        adapters.deepspeed_distributed(kernels.local_attention), axes=("bthd", "bthd"),
        stand_in=f"{_WINDOWS} (its own parameter)",
    ),
    Peer(
        "DeepSpeed DistributedAttention, boolean mask", "deepspeed", "deepspeed.sequence.layer.DistributedAttention",
        adapters.deepspeed_distributed(kernels.plain_attention), axes=("bthd", "bthd"),
        refuses=_only("window", why="the same as without the mask"),
        stand_in="SDPA with a boolean mask as the local attention: all that PyTorch offers for a window on CPU",
    ),
    Peer(
        "DeepSpeed UlyssesSPAttentionHF", "deepspeed",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF", adapters.deepspeed_hf, axes=("bhtd", "bthd"),
        stand_in=f"transformers' SDPA function; for window and packed {_WINDOWS}, in place of transformers' flash-attn",
    ),
    Peer(
        "para-attn Ulysses", "para-attn", "para_attn.ulysses_attn_func", adapters.para_attn,
        stand_in=f"none for causal; else {_WINDOWS} (its `attn_func`)",
    ),
    Peer(
        "para-attn ring", "para-attn", "para_attn.ring_attn_func", _not_built,
        refuses=_never("its backward raises NotImplementedError"),
    ),
    Peer(
        "PyTorch ring template, all-gather", "torch",
        "torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention",
        adapters.torch_template("allgather"), refuses=_only("causal", why=_RINGS), layout="zigzag",
        stand_in=f"{FLASH} as the template's `op`",
    ),
    Peer(
        "PyTorch ring template, all-to-all", "torch",
        "torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention",
        adapters.torch_template("alltoall"), refuses=_only("causal", why=_RINGS), layout="zigzag",
        stand_in=f"{FLASH} as the template's `op`",
    ),
    Peer(
        "yunchang Ulysses", "yunchang", "yunchang.UlyssesAttention", adapters.yunchang_ulysses, axes=("bthd", "bthd"),
        refuses=_only("causal", "window", why=_ULYSSES_FA), stand_in=f"{FLASH} in place of flash-attn",
    ),
    Peer(
        "yunchang ring, zigzag", "yunchang", "yunchang.LongContextAttention(ring_impl_type='zigzag')",
        adapters.yunchang_ring("zigzag"), axes=("bthd", "bthd"), layout="zigzag",
        refuses=_only(
            "causal", "window", why="its varlen form halves every document's offsets: lengths that 2 x ranks divide"
        ),
        stand_in=f"{FLASH} in place of flash-attn",
    ),
    Peer(
        "yunchang ring, basic", "yunchang", "yunchang.LongContextAttention(ring_impl_type='basic')",
        adapters.yunchang_ring("basic"), axes=("bthd", "bthd"),
        refuses=_only("causal", "window", why="its varlen form cuts every document evenly over the ranks"),
        stand_in=f"{FLASH} in place of flash-attn",
    ),
    Peer(
        "ringmaster Ulysses", "axolotl-ringmaster", "ringmaster.strategies.ulysses.make_ulysses_attention('sdpa')",
        adapters.ringmaster("ulysses"), axes=("bhtd", "bthd"),
        stand_in="none: its own `sdpa`, a boolean mask for window and packed; over gloo it gathers in place of all-to-all",
    ),
    Peer(
        "ringmaster ring, all-gather", "axolotl-ringmaster", "ringmaster.strategies.ring.make_ring_attention('math')",
        adapters.ringmaster("ring"), axes=("bhtd", "bthd"),
        stand_in="none: its own `math` blocks, SDPA with a boolean mask for window and packed (its flash is CUDA's)",
    ),
    Peer(
        "ringmaster ring, point to point", "axolotl-ringmaster", "ringmaster.ring.p2p_attn.ring_p2p_attention",
        adapters.ringmaster("ring", rotate="alltoall"), axes=("bhtd", "bthd"),
        refuses=_only("causal", why=_RINGMASTER_P2P), stand_in="none: its own explicit softmax (its flash is CUDA's)",
    ),
    Peer(
        "ringmaster ring, distflash", "axolotl-ringmaster", "ringmaster.ring.distflash.distflash_attention",
        adapters.ringmaster("ring", balance="distflash"), axes=("bhtd", "bthd"),
        refuses=_only("causal", "packed", why="its balanced rings take no window"),
        stand_in="none: its own `math` blocks (its flash is CUDA's)",
    ),
    Peer(
        "ringmaster ring, zigzag", "axolotl-ringmaster", "ringmaster.ring.zigzag.zigzag_ring_attention",
        adapters.ringmaster("ring", balance="head_tail"), axes=("bhtd", "bthd"), layout="zigzag",
        refuses=_only("packed", why="raises without CUDA, except on packed input"),
        stand_in="none: its own masked blocks",
    ),
    Peer(
        "ring-attention-pytorch ring_flash_attn", "ring-attention-pytorch", "ring_attention_pytorch.ring_flash_attn",
        adapters.lucidrains_ring, axes=("bthd", "bthd"),
        refuses=_only("causal", "window", why="its key mask is ignored when causal: no documents"),
        stand_in="none: its plain PyTorch blocks; query heads in its own order of groups",
    ),
    Peer(
        "ring-attention-pytorch zig_zag_attn", "ring-attention-pytorch",
        "ring_attention_pytorch.zig_zag_attention.zig_zag_attn", adapters.lucidrains_zigzag, layout="zigzag",
        stand_in="none: SDPA with a boolean mask of ours; query heads in its own order of groups",
    ),
]  # fmt: skip
