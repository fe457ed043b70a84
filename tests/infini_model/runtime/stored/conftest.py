"""A clock for leases: no delay of this machine lets one expire."""

from __future__ import annotations

import time

import pytest

from infini_model.runtime.stored import lease, record


class Clock:
    """Time that passes only when a test, or somebody who waits, says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which leases end; how often they are renewed is another matter."""
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(record, "time", clock)
    return clock
