"""Compare the inputs of a group's ranks by digests, before any other exchange."""

import hashlib
from collections import Counter

import torch

from longspan.comm.gather import stack
from longspan.comm.groups import RankGroup
from longspan.comm.transport import transport_of
from longspan.errors import CommError, DisagreementError

_WIDTH = 32
_TEXT = 480


def check_agreement(group: RankGroup | None, what: dict[str, bytes], problem: Exception | None = None) -> None:
    """Compare `what` (name -> bytes) over the ranks of `group`; raise on every rank if one differs or has a `problem`.

    Collective: one all-gather of a few hundred bytes. Raises `DisagreementError` with the name of the entry that differs
    and the ranks in the minority. A rank that passes a `problem` raises this problem, and the other ranks raise a
    `DisagreementError` with its text. Raises `CommError` if a peer is lost.
    """
    if group is None or transport_of(group).size == 1:
        if problem is not None:
            raise problem
        return
    text = ("" if problem is None else str(problem)).encode()[:_TEXT]
    parts = [hashlib.sha256(value).digest() for value in what.values()]
    packet = b"".join(parts) + len(text).to_bytes(2, "little") + text.ljust(_TEXT, b"\0")
    try:
        everyone = stack(torch.frombuffer(bytearray(packet), dtype=torch.uint8), group)
    except RuntimeError as error:
        raise CommError(
            f"comparing {', '.join(what)} over the group failed: {str(error).splitlines()[0]}",
            hint="look at the logs of the other ranks: one has ended, or does not make the same calls in the same order",
        ) from error
    packets = [bytes(row) for row in everyone.numpy()]
    if problem is not None:
        raise problem
    _raise_first_problem(group, packets, _WIDTH * len(parts))
    for index, name in enumerate(what):
        _raise_on_difference(group, name, [p[_WIDTH * index : _WIDTH * (index + 1)] for p in packets])


def _raise_first_problem(group: RankGroup, packets: list[bytes], offset: int) -> None:
    for rank, packet in enumerate(packets):
        size = int.from_bytes(packet[offset : offset + 2], "little")
        if size:
            text = packet[offset + 2 : offset + 2 + size].decode(errors="replace")
            raise DisagreementError(f"{_name(group, rank)} failed: {text}")


def _raise_on_difference(group: RankGroup, name: str, versions: list[bytes]) -> None:
    (common, _), *others = Counter(versions).most_common()
    if not others:
        return
    odd = [rank for rank, version in enumerate(versions) if version != common]
    raise DisagreementError(
        f"the ranks of one context-parallel group were given different {name}: {', '.join(_name(group, r) for r in odd)} "
        f"differ from {_name(group, versions.index(common))}",
        hint="give all ranks of a CP group the same options and samples: key the loader by the data-parallel rank alone",
    )


def _name(group: RankGroup, rank: int) -> str:
    world = transport_of(group).global_rank(rank)
    return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"
