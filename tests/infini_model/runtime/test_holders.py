"""Locks that record their holder: whoever finds one held learns by whom."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from infini_model.runtime import holders
from infini_model.runtime.holders import Holder, hold, holder_of
from infini_model.runtime.storage import lock


def test_a_holder_is_read_while_it_holds(tmp_path: Path) -> None:
    ours = Holder.current(tmp_path, None)
    with hold(tmp_path / "lock", ours):
        assert holder_of(tmp_path / "lock") == ours
    assert holder_of(tmp_path / "lock") is None


def test_a_holder_that_is_about_to_release_is_not_taken_for_an_unknown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has withdrawn its record, but not yet the lock."""
    with contextlib.ExitStack() as held:
        assert held.enter_context(lock(tmp_path / "lock", wait=False))
        # It releases the lock as soon as somebody who has found no record waits.
        monkeypatch.setattr(holders, "time", SimpleNamespace(sleep=lambda _: held.close()))
        assert holder_of(tmp_path / "lock") is None


def test_a_lock_without_a_record_has_an_unknown_holder(tmp_path: Path) -> None:
    with lock(tmp_path / "lock", wait=False):
        assert holder_of(tmp_path / "lock") == Holder()
