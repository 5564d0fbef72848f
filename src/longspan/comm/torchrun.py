"""What torchrun, or any launcher of its kind, tells a process. No torch."""

import os


def under_torchrun() -> bool:
    """Whether a launcher has told this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int | None:
    """Ranks of the world that a launcher made; None without one."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
