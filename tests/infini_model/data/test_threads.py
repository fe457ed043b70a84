"""Threads process each item once, report one at a time, and stop at the first error."""

import os
import signal
import threading
import time

import pytest
from commands import PATIENCE

from infini_model.data.threads import for_each, thread_count


def report_until_stopped(advance):
    """Only the error that a report raises ends it; without one the test hangs."""
    while True:
        advance(1)
        time.sleep(0.001)


def test_every_item_is_processed_once_and_reported_one_at_a_time():
    done: list[int] = []
    inside = threading.Lock()
    total = 0

    def advance(count):
        nonlocal total
        assert inside.acquire(blocking=False)
        before = total
        time.sleep(0.0001)
        total = before + count
        inside.release()

    def work(item, advance):
        advance(item)
        done.append(item)

    for_each(iter(range(100)), [work] * 4, advance)
    assert sorted(done) == list(range(100))
    assert total == sum(range(100))


def test_the_first_error_is_raised_and_stops_the_other_workers():
    started = []
    all_at_work = threading.Barrier(3)

    def work(item, advance):
        started.append(item)
        all_at_work.wait(PATIENCE)
        if item == 1:
            raise ValueError("item 1")
        report_until_stopped(advance)

    with pytest.raises(ValueError, match="item 1"):
        for_each(range(100), [work] * 3, lambda _: None)
    assert sorted(started) == [0, 1, 2]


def test_an_error_of_the_iterable_is_raised():
    def items():
        yield 1
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        for_each(items(), [lambda _item, advance: advance(1)] * 2, lambda _: None)


def test_ctrl_c_stops_the_work():
    def work(_item, advance):
        os.kill(os.getpid(), signal.SIGINT)
        report_until_stopped(advance)

    with pytest.raises(KeyboardInterrupt):
        for_each([1], [work], lambda _: None)


def test_threads_are_as_many_as_requested_or_as_cores():
    assert thread_count(3) == 3
    assert thread_count(0) == len(os.sched_getaffinity(0))
