"""Environment variables of torchrun and similar launchers. No torch."""

import os


def under_torchrun() -> bool:
    """Whether RANK and WORLD_SIZE are set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int | None:
    """Return WORLD_SIZE, or None without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def local_world_size() -> int | None:
    """Return LOCAL_WORLD_SIZE, or None if unset or without a launcher."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() and "LOCAL_WORLD_SIZE" in os.environ else None


def local_ranks(world: int) -> int:
    """Return the number of ranks on this machine: LOCAL_WORLD_SIZE (default 1) under a launcher, otherwise `world`."""
    return (local_world_size() or 1) if under_torchrun() else world
