"""How pytest-xdist shares out the tests: those that start processes in two chains, every other test where there is room."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_STARTS_PROCESSES = (
    "run_ranks", "own_ranks", "share_out", "run_step", "run_on_ranks", "check_in_memory", "check_through", "check_cases",
    "launch(", "subprocess", "CliRunner", "replay_on_ranks",
)  # fmt: skip
"""Words of a test file that starts processes: ranks of a world, or a command."""
_RUNS = ("tests/train/", "tests/verify/", "tests/cli/", "tests/benchmarks/", "tests/advise/")
"""Folders whose tests start whole runs: a chain of their own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Chains(config, log)


class _Chains(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if not _starts_processes(self.config.rootpath / file) or (
            file.startswith("tests/kernels/") and "matrix" not in nodeid
        ):
            return nodeid
        return "runs" if file.startswith(_RUNS) else "ranks"


@cache
def _starts_processes(path: Path) -> bool:
    text = path.read_text()
    return any(word in text for word in _STARTS_PROCESSES)


@pytest.fixture
def warm() -> Iterator[None]:
    """Launched ranks that need not import torch again, for tests that look at nothing of how processes start."""
    from tests.ranks import warm_launches

    with warm_launches():
        yield
