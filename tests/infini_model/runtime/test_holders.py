"""Locks that record their holder: whoever finds one held learns by whom."""

import threading
from pathlib import Path

from infini_model.runtime.holders import PAUSE_SECONDS, Holder, hold, holder_of
from infini_model.runtime.storage import lock


def test_a_holder_is_read_while_it_holds(tmp_path: Path) -> None:
    ours = Holder.current(tmp_path, None)
    with hold(tmp_path / "lock", ours):
        assert holder_of(tmp_path / "lock") == ours
    assert holder_of(tmp_path / "lock") is None


def test_a_holder_that_is_about_to_release_is_not_taken_for_an_unknown_one(tmp_path: Path) -> None:
    """It has withdrawn its record, but not yet the lock."""
    path, held, released = tmp_path / "lock", threading.Event(), threading.Event()

    def release_soon() -> None:
        with lock(path, wait=False):
            held.set()
            released.wait(PAUSE_SECONDS / 2)

    thread = threading.Thread(target=release_soon)
    thread.start()
    assert held.wait(10)
    found = holder_of(path)
    thread.join()
    assert found is None


def test_a_lock_without_a_record_has_an_unknown_holder(tmp_path: Path) -> None:
    with lock(tmp_path / "lock", wait=False):
        assert holder_of(tmp_path / "lock") == Holder()
