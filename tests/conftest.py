"""Under pytest-xdist, tests that start processes run one after the other in one worker; all others share the other workers."""

import pytest

_STARTS_RANKS = {
    "run_ranks", "own_ranks", "share_out", "launch", "run_step", "run_on_ranks", "check_in_memory", "check_through",
    "check_cases", "subprocess", "CliRunner", "verify", "replay_on_ranks",
}  # fmt: skip
"""Names in a test's module by which it starts processes: ranks of a world, or a command."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _STARTS_RANKS & vars(item.module).keys():
            item.add_marker(pytest.mark.xdist_group("ranks"))
    # The one long group first: the other workers fill the time beside it.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
