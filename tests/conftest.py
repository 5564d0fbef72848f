"""How pytest-xdist shares out the tests: those that start processes in three chains, every other test where there is room."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("nightly")  # `tests/examples.py` asks which one is loaded

_STARTS_PROCESSES = (
    "run_ranks", "own_ranks", "share_out", "run_step", "run_on_ranks", "check_through", "check_cases",
    "launch(", "subprocess", "CliRunner", "replay_on_ranks", "test_checkpoint import",
)  # fmt: skip
"""Words of a test file that starts processes: ranks of a world, or a command."""
_CHAINS = {"train": "training", "advise": "training", "verify": "runs", "cli": "runs", "benchmarks": "runs"}
"""Folder of tests -> the chain of those that start processes; all other folders: "ranks"."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Chains(config, log)


class _Chains(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        if not _starts_processes(self.config.rootpath, nodeid):
            return nodeid
        return _CHAINS.get(nodeid.split("/")[1], "ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that `make quick` leaves out because they start processes."""
    for item in items:
        if _starts_processes(config.rootpath, item.nodeid):
            item.add_marker(pytest.mark.ranks)


def _starts_processes(root: Path, nodeid: str) -> bool:
    file = nodeid.split("::")[0]
    if file.startswith("tests/kernels/") and "matrix" not in nodeid:
        return False  # of these files, only the oracle matrices start processes
    return _has_words(root / file)


@cache
def _has_words(path: Path) -> bool:
    text = path.read_text()
    return any(word in text for word in _STARTS_PROCESSES)


@pytest.fixture
def warm() -> Iterator[None]:
    """Launched ranks that need not import torch again, for tests that look at nothing of how processes start."""
    from tests.ranks import warm_launches

    with warm_launches():
        yield
