"""Heartbeats and hang detection, with a fake clock; real hangs: `launch/test_launch.py`."""

import os

import pytest

from infini_model.training.launch import heartbeat
from infini_model.training.launch.heartbeat import (
    MEDIAN_STEPS,
    MIN_LIMIT_SECONDS,
    PAUSE_LIMIT_SECONDS,
    HangDetector,
    Heartbeat,
)


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def silence(self, detector, seconds):
        """Poll every half second until a hang is detected or time is up; returns the time taken."""
        began = self.now
        while self.now - began < seconds:
            self.now += 0.5
            if hang := detector(os.getpid()):
                return self.now - began, hang
        return None

    def steps(self, hearts, count, seconds):
        for _ in range(count):
            self.now += seconds
            for heart in hearts:
                heart.after_gradients()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


@pytest.fixture
def hearts(tmp_path, clock, monkeypatch):
    """Heartbeats of two ranks, both of this process, and their detector; it requests no stacks."""
    monkeypatch.setattr(HangDetector, "_ask_for_stacks", lambda self: None)

    def make(timeout=None):
        detector = HangDetector(tmp_path, {0: 5, 1: 3}, timeout)
        return detector, [Heartbeat(tmp_path, rank, timeout) for rank in range(2)]

    return make


@pytest.mark.parametrize(
    ("step", "timeout", "limit"),
    [
        (7.0, None, MEDIAN_STEPS * 7.0),
        (0.01, None, MIN_LIMIT_SECONDS),
        (0.01, 5.0, 5.0),
    ],
    ids=["20 median steps", "a minute", "the timeout"],
)
def test_a_silence_of_this_long_is_a_hang(clock, hearts, step, timeout, limit):
    detector, ranks = hearts(timeout)
    clock.steps(ranks, 10, seconds=step)
    if timeout is not None:
        # Only one rank is behind: the other waits for it.
        assert clock.silence(detector, limit / 2) is None
        ranks[0].after_gradients()
        limit /= 2
    took, hang = clock.silence(detector, 1000.0)
    assert limit < took < limit + 2
    assert (hang.rank, hang.gpu) == ((None, None) if timeout is None else (1, 3))


def test_startup_and_long_pauses_are_allowed(clock, hearts):
    detector, ranks = hearts(timeout=5.0)
    assert clock.silence(detector, PAUSE_LIMIT_SECONDS) is None
    clock.steps(ranks, 10, seconds=0.01)
    for heart in ranks:
        heart.expect_long_work()
    assert clock.silence(detector, PAUSE_LIMIT_SECONDS) is None
    # The pause does not count towards the median step.
    clock.steps(ranks, 2, seconds=0.01)
    took, _ = clock.silence(detector, 1000.0)
    assert took < 7.0


def test_a_pause_of_the_launcher_and_a_rank_that_has_finished_are_no_hang(clock, hearts):
    detector, ranks = hearts()
    clock.steps(ranks, 10, seconds=0.01)
    assert clock.silence(detector, 5.0) is None
    clock.now += 10_000.0
    assert detector(os.getpid()) is None
    ranks[1].close()
    for _ in range(20):
        clock.steps(ranks[:1], 1, seconds=0.01)
        assert clock.silence(detector, 5.0) is None
