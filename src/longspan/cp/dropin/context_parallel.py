"""`context_parallel`: a program of plain `scaled_dot_product_attention`, run on a sharded sequence.

    with context_parallel(mesh, buffers=(ids, freqs), buffer_seq_dims=(1, 0)):
        enter    buffers            global length S -> local length T, in place
        inside   SDPA               replaced by `attention` with the plan of the call's mask
                 other attention    `SpecError`: would see only this rank's keys
                 arange(T), cumsum  `SpecError`: would count only this rank's tokens
        exit     buffers            restored

`intercept` finds the calls; `recognise` turns dense masks into bands; `local` lists the operators that are refused, and
`models` the models of transformers.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from longspan.comm.agree import check_agreement
from longspan.comm.groups import Group, as_group, rank_and_size
from longspan.comm.sharding import gather, shard
from longspan.cp.attention import attention
from longspan.cp.context import ContextParallel, latest
from longspan.cp.dropin.intercept import intercepted, is_intercepted, traced
from longspan.cp.dropin.local import HF_WAY_OUT, LocalTokens
from longspan.cp.dropin.models import checked_models
from longspan.cp.dropin.recognise import mask_of_dense
from longspan.cp.engine.call_checks import announce
from longspan.errors import LongspanError, SpecError
from longspan.names import BALANCED
from longspan.plan import Mask, Plan

Tensor = torch.Tensor


@contextmanager
def context_parallel(
    mesh: Group,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    layout: str = "zigzag",
    route: str = "ring",
    inner: int | None = None,
    kernel: str = "auto",
    comm_dtype: torch.dtype | str | None = None,
    mask: Mask | None = None,
    seq_len: int | None = None,
    allow_local: Iterable[str] = (),
) -> Iterator["DropIn"]:
    """Run plain PyTorch on a sharded sequence, as `torch.distributed.tensor.experimental.context_parallel` does.

    Inside, `buffers` hold this rank's slots along `buffer_seq_dims` (`S` becomes `T`), and
    `scaled_dot_product_attention` of local q, k, v `(..., T, D)` attends over the global sequence. Backward may run
    inside or afterwards. On exit, also by an exception, all buffers except `no_restore_buffers` are restored to their
    global content, without writes made inside. Yields a `DropIn`, whose `unshard` gathers local results.

    - `layout`, `route`, `inner`, `kernel`, `comm_dtype`: as for `ContextParallel`.
    - `mask`: mask of calls without `attn_mask`. Default: full, or causal with `is_causal`. Required by "balanced".
    - `seq_len`: length S of the global sequence. Required if neither buffers nor mask are given.
    - `allow_local`: kinds of operators that may run over `T` rows, because these rows are not tokens of the sequence:
      "arange", "slice", "cumsum", "softmax", "matmul", "conv", "recurrent", "roll". Otherwise they are refused.

    Collective: the ranks compare all arguments, and raise `DisagreementError` if these differ. A call inside that cannot
    be computed raises `SpecError`, on all ranks. Warns at the end if there was no attention call inside.
    """
    if is_intercepted():
        raise SpecError(
            "context_parallel was entered inside context_parallel", hint="leave the outer block before the inner one"
        )
    size = mesh.size() if isinstance(mesh, DeviceMesh) else rank_and_size(as_group(mesh))[1]
    # The numbers of heads are unknown until the first call. Until then, use numbers that every route accepts.
    cp = ContextParallel(mesh, layout, route, (size, size), inner, kernel, comm_dtype)
    held, dims = [] if isinstance(buffers, Tensor) else list(buffers or ()), list(buffer_seq_dims or ())
    problem: Exception | None = None
    what = {"layouts, masks or routes": b"", "buffers": b""}
    try:
        if isinstance(buffers, Tensor):
            raise SpecError("buffers is a single tensor", hint="give a tuple of tensors, such as (ids,)")
        if mask is not None and not isinstance(mask, Mask):
            raise SpecError(f"mask is a {type(mask).__name__}", hint="give a longspan.Mask, or a dense one to SDPA")
        staying = _check_buffers(held, dims, no_restore_buffers)
        dropin = DropIn(cp, _length(held, dims, mask, seq_len), mask)
        tokens = LocalTokens.of(dropin.seq_len, dropin.shard_lengths, allow_local)
        given = repr([(buffer.shape, buffer.dtype, dim) for buffer, dim in zip(held, dims, strict=True)])
        chosen = dropin.digest + repr(sorted(tokens.allowed)).encode()
        what = {"layouts, masks or routes": chosen, "buffers": given.encode()}
        shards = [_local(buffer, dropin, dim) for buffer, dim in zip(held, dims, strict=True)]
    except Exception as error:
        # Of any type: check_agreement also raises on the other ranks, which would hang otherwise.
        problem = error
    check_agreement(cp.group, what, problem)
    with ExitStack() as stack:
        for buffer, local in zip(held, shards, strict=True):
            if id(buffer) not in staying:
                stack.callback(_swap, buffer, buffer.data)
            if not buffer.is_inference():
                increment_version(buffer)  # a graph that saved the global buffer must fail in backward
            _swap(buffer, local)
        slots = dropin.layout.num_slots(cp.rank)
        if size > 1:
            stack.enter_context(checked_models(dropin.seq_len, mask))
        kernels = stack.enter_context(intercepted(dropin.scaled_dot_product_attention, slots, tokens))
        yield dropin
    if size > 1 and not kernels.num_own:
        warnings.warn(
            "context_parallel ended without a call of scaled_dot_product_attention: attention by other means, if there "
            "was any, covered one rank's tokens only",
            stacklevel=3,
        )


class DropIn:
    """A program on a sharded sequence: layout, shard and unshard, and `scaled_dot_product_attention`."""

    def __init__(self, cp: ContextParallel, seq_len: int, mask: Mask | None) -> None:
        if cp.planner.layout == BALANCED and mask is None:
            raise SpecError(
                "layout 'balanced' is computed from a mask, and buffers are sharded before the first attention call",
                hint='set mask=, such as Mask.documents(lengths); or layout="zigzag"',
            )
        self.mask, self.seq_len = mask, seq_len
        self.cp, self.layout = cp, cp.planner.layout_of({"full": mask or Mask.causal(seq_len)})
        self._has_attended = False
        self._plans: dict[tuple[tuple[int, int], Mask], Plan] = {}
        self._recognised: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @cached_property
    def shard_lengths(self) -> frozenset[int]:
        """Numbers of tokens of the ranks, without 0, 1 and `S`, by which a dim of one rank's tokens is recognised."""
        return frozenset(map(self.layout.num_slots, range(self.layout.ranks))) - {0, 1, self.seq_len}

    @property
    def digest(self) -> bytes:
        """Digest of layout, route and mask, which must be equal on all ranks."""
        planner = self.cp.planner
        return (
            self.layout.fingerprint()
            + f"{planner.route} {planner.inner} {planner.comm_dtype}".encode()
            + (b"" if self.mask is None else self.mask.fingerprint())
        )

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slots of a global tensor: dim `dim` shrinks from `S` to `T`. Differentiable."""
        return shard(x, self.layout, self.cp.rank, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Gather the global tensor on every rank. Collective, differentiable, as `Sequence.unshard`."""
        return gather(x, self.layout, self.cp.rank, dim, self.cp.group)

    def scaled_dot_product_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`torch.nn.functional.scaled_dot_product_attention` of local q, k, v `(..., T, D)` over the global sequence."""
        try:
            if dropout_p:
                raise SpecError(f"dropout_p={dropout_p}: longspan attention has no dropout", hint="set dropout_p=0.0")
            self._check_lengths(query, key, value)
            heads = _heads(query, key, value, enable_gqa)
            q, k, v = traced(_four_dims(query), _four_dims(key), _four_dims(value))
            plan = self._plan(heads, self._mask(attn_mask, is_causal))
        except LongspanError as problem:
            if query.is_cuda and self._has_attended:  # where later calls are not compared
                raise
            announce(self.cp.group, problem)
        self._has_attended = True
        out = attention(q, k, v, plan=plan, group=self.cp.group, scale=scale, kernel=self.cp.kernel)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _plan(self, heads: tuple[int, int], mask: Mask) -> Plan:
        """Return the plan of a mask for these heads. Caches the latest 16."""
        planner = replace(self.cp.planner, heads=heads)
        return latest(self._plans, (heads, mask), lambda: planner.plan(self.layout, mask))

    def _check_lengths(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if min(q.ndim, k.ndim, v.ndim) < 2:
            raise SpecError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: SDPA takes (..., tokens, head_dim)"
            )
        lengths = (q.shape[-2], k.shape[-2], v.shape[-2])
        slots = self.layout.num_slots(self.cp.rank)
        if lengths == (slots,) * 3:
            return
        held = f"rank {self.cp.rank} holds {slots} of {self.seq_len} tokens"
        if len(set(lengths)) > 1:
            rows = "{}, {} and {}".format(*lengths)
            raise SpecError(
                f"q, k and v have {rows} rows, and {held}; cross-attention cannot be sharded",
                hint="call cross-attention outside context_parallel, on global tensors",
            )
        raise SpecError(
            f"q, k and v have {lengths[0]} rows, and {held}",
            hint="add the tensors that q, k and v are computed from to buffers, with their sequence dims",
        )

    def _mask(self, attn_mask: Tensor | None, is_causal: bool) -> Mask:
        """Return the mask of a call, from its own arguments and the mask of the context."""
        if attn_mask is not None and is_causal:
            raise SpecError("both attn_mask and is_causal are set", hint="leave one of them out")
        if attn_mask is not None:
            self._check_whole(attn_mask)
            return self._recognise(attn_mask)
        if self.mask is None:
            return self._causal if is_causal else self._full
        if is_causal and not self._looks_back:
            raise SpecError(
                "is_causal=True contradicts the mask of context_parallel, in which queries see later keys",
                hint="set is_causal=False to use the mask of context_parallel, or leave mask out of context_parallel",
            )
        return self.mask

    def _check_whole(self, attn_mask: Tensor) -> None:
        """Raise `SpecError` if a mask has the shape of a shard: `(..., T, T)` or, of keys alone, `(..., 1, T)`."""
        shape = tuple(attn_mask.shape)
        if shape[-1:] and shape[-1] in self.shard_lengths and {*shape[-2:]} <= {1, *self.shard_lengths}:
            raise SpecError(
                f"attn_mask of shape {shape} covers one rank's tokens, not the {self.seq_len} of the sequence; "
                "transformers makes such masks of padding, windows, or positions that jump",
                hint="give the mask of the global sequence, outside buffers. With transformers, add an attention_mask "
                f"of ones, (1, S), to buffers if only positions jump; else {HF_WAY_OUT}",
            )

    def _recognise(self, attn_mask: Tensor) -> Mask:
        """Return the mask equal to a dense mask. Cached until the tensor, or the base of a view, is freed or written to."""
        if attn_mask.is_inference():
            return mask_of_dense(attn_mask, self.seq_len, self.mask)
        base = attn_mask if attn_mask._base is None else attn_mask._base
        state = attn_mask._version, attn_mask.data_ptr(), attn_mask.shape, attn_mask.stride(), attn_mask.requires_grad
        known, mask = self._recognised.get(base, (None, None))
        if known != state:
            mask = mask_of_dense(attn_mask, self.seq_len, self.mask)
            self._recognised[base] = state, mask
        return mask

    @cached_property
    def _causal(self) -> Mask:
        return Mask.causal(self.seq_len)

    @cached_property
    def _full(self) -> Mask:
        return Mask.full(self.seq_len)

    @cached_property
    def _looks_back(self) -> bool:
        return self.mask is not None and bool((self.mask.array[:, 4] >= 0).all())


def _check_buffers(
    buffers: Sequence[Tensor], dims: Sequence[int], no_restore_buffers: Iterable[Tensor] | None
) -> set[int]:
    """Return the ids of the buffers that stay sharded. Raises `SpecError` if a buffer cannot be sharded in place."""
    if len(buffers) != len(dims):
        raise SpecError(f"{len(buffers)} buffers but {len(dims)} buffer_seq_dims", hint="give one dim for each buffer")
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(buffer, Tensor):
            raise SpecError(f"buffer {index} is a {type(buffer).__name__}, not a tensor")
        if buffer.requires_grad:
            raise SpecError(
                f"buffer {index} of shape {tuple(buffer.shape)} requires a gradient, but "
                "would get only the gradient of a shard",
                hint="give x.detach() and call requires_grad_() inside; or shard x by DropIn.shard instead",
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise SpecError(f"dim {dim} does not exist in buffer {index} of shape {tuple(buffer.shape)}")
    names, staying = [id(buffer) for buffer in buffers], {id(buffer) for buffer in no_restore_buffers or ()}
    if len(set(names)) < len(names):
        raise SpecError("buffers holds one tensor twice", hint="give each tensor once")
    if not staying <= set(names):
        raise SpecError("no_restore_buffers holds a tensor that is not in buffers", hint="add the tensor to buffers")
    return staying


def _length(buffers: Sequence[Tensor], dims: Sequence[int], mask: Mask | None, seq_len: int | None) -> int:
    """Return `S`, from the mask, `seq_len` or the first buffer."""
    if mask is not None and seq_len not in (None, mask.seq_len):
        raise SpecError(f"seq_len={seq_len}, but the mask covers {mask.seq_len} tokens", hint="leave seq_len out")
    length = seq_len if mask is None else mask.seq_len
    if length is None and not buffers:
        raise SpecError("no sequence length: there are no buffers and no mask", hint="set seq_len to the global length")
    return length if length is not None else buffers[0].shape[dims[0]]


def _local(buffer: Tensor, dropin: DropIn, dim: int) -> Tensor:
    """Return this rank's slots of a buffer. If the buffer is an inference tensor, the result is one too."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        return shard(buffer, dropin.layout, dropin.cp.rank, dim)


def _swap(buffer: Tensor, data: Tensor) -> None:
    buffer.data = data


def _heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[int, int]:
    heads, kv_heads, v_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    if kv_heads != v_heads or (not enable_gqa and kv_heads not in (1, heads)):
        raise SpecError(
            f"q, k and v have {heads}, {kv_heads} and {v_heads} heads, enable_gqa={enable_gqa}",
            hint="give k and v as many heads as q, or with enable_gqa=True a number of heads that divides that of q",
        )
    return heads, kv_heads


def _four_dims(x: Tensor) -> Tensor:
    """Reshape `(..., H, T, D)` or `(T, D)` to `(B, H, T, D)`."""
    return x[None, None] if x.ndim == 2 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
