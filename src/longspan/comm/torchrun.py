"""What torchrun, or any launcher of its kind, tells a process. No torch."""

import os


def under_torchrun() -> bool:
    """Whether a launcher has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int | None:
    """Ranks of the world that a launcher made; None without one."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def local_world_size() -> int | None:
    """Ranks that the launcher started on this machine; None without one."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() and "LOCAL_WORLD_SIZE" in os.environ else None


def local_ranks(world: int) -> int:
    """Ranks on this machine: all of `world` if this process starts them, else as many as the launcher says, at least its own."""
    return (local_world_size() or 1) if under_torchrun() else world
