"""Tiny tensors are fastest on one thread, and the baseline asks for all cores."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
