"""Files are complete or absent, locks end with their holder and name it, facts are kept."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest
from commands import PATIENCE
from disks import small

from infini_model.runtime import holders, storage
from infini_model.runtime.errors import UserError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.holders import Holder, hold, holder_of


def interrupt(opened, name):
    """Start to write, then fail."""
    with opened as temporary:
        (temporary / name if name else temporary).write_text("half")
        raise InterruptedError


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "below" / "file.txt"
    with pytest.raises(InterruptedError):
        interrupt(storage.atomic_file(target), None)
    assert list(target.parent.iterdir()) == []
    with storage.atomic_file(target) as temporary:
        temporary.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_is_replaced_completely_or_not_at_all(tmp_path):
    target = tmp_path / "folder"
    with storage.atomic_folder(target) as temporary:
        (temporary / "old").write_text("old")
    with pytest.raises(InterruptedError):
        interrupt(storage.atomic_folder(target), "new")
    assert [path.name for path in target.iterdir()] == ["old"]
    with storage.atomic_folder(target) as temporary:
        (temporary / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_leftovers_of_a_killed_writer_are_removed_by_name(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            with storage.atomic_folder(tmp_path / "a") as temporary:
                (temporary / "half").write_text("half")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    assert (storage.retire(tmp_path / "b") / "file").exists()
    assert len(list(tmp_path.iterdir())) == 2
    storage.remove_leftovers(tmp_path, "a")
    assert len(list(tmp_path.iterdir())) == 1
    storage.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.story
@pytest.mark.parametrize("kind", [storage.atomic_file, storage.atomic_folder])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, kind):
    target = tmp_path / "disk" / "big"

    def fill():
        with kind(target) as temporary:
            file = temporary / "file" if temporary.is_dir() else temporary
            file.write_bytes(bytes(2_000_000))

    message = f"^{target}: the disk is full; no partial file was kept$"
    with small(target.parent):
        with pytest.raises(UserError, match=message):
            fill()
        assert list(target.parent.iterdir()) == []


def test_a_path_that_is_not_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below: cannot be written: Not a directory"):
        storage.make_folder(tmp_path / "file" / "below")


@pytest.mark.parametrize("above", [-1, 0, 1], ids=["small", "at the limit", "large"])
def test_sha256_is_that_of_the_whole_file(tmp_path, above):
    content = bytes(range(256)) * (storage.SMALL_BYTES // 256 + 1)
    content = content[: storage.SMALL_BYTES + above]
    (tmp_path / "file").write_bytes(content)
    assert storage.sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_holders_of_a_shared_lock_exclude_exclusive_ones_only(tmp_path):
    path = tmp_path / "lock"
    assert not storage.is_locked(path)
    assert not path.exists()
    with storage.lock(path, shared=True), storage.lock(path, shared=True, wait=False) as also:
        assert also
        with storage.lock(path, wait=False) as alone:
            assert not alone
    with storage.lock(path):
        assert storage.is_locked(path)
        with storage.lock(path, shared=True, wait=False) as shared:
            assert not shared
    assert not storage.is_locked(path)


def test_who_asks_whether_a_lock_is_held_keeps_nobody_from_taking_it(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    path.touch()
    with path.open() as prober:
        fcntl.flock(prober, fcntl.LOCK_SH)
        monkeypatch.setattr(storage.time, "sleep", lambda _: fcntl.flock(prober, fcntl.LOCK_UN))
        with storage.lock(path, wait=False) as held:
            assert held


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made again"])
def test_who_waits_for_a_lock_that_is_deleted_takes_the_new_one(
    tmp_path, monkeypatch, shared, again
):
    path = tmp_path / "below" / "lock"
    opened, taken, end = threading.Event(), threading.Event(), threading.Event()
    flock = storage._flock

    def wait():
        with storage.lock(path, shared=shared):
            taken.set()
            end.wait()

    def flock_of_an_open_file(*arguments):
        opened.set()
        return flock(*arguments)

    waiter = threading.Thread(target=wait, daemon=True)
    with storage.lock(path):
        monkeypatch.setattr(storage, "_flock", flock_of_an_open_file)
        waiter.start()
        assert opened.wait(PATIENCE)
        shutil.rmtree(path.parent)
        if again:
            with storage.lock(path, wait=False) as other:
                assert other
    assert taken.wait(PATIENCE)
    with storage.lock(path, wait=False) as free:
        assert not free
    end.set()
    waiter.join()


def test_an_exclusive_lock_is_on_a_file_that_is_open_for_writing(tmp_path, monkeypatch):
    """A network file system gives it on no other."""
    modes, flock = [], fcntl.flock

    def noted(file, kind):
        if kind & fcntl.LOCK_EX:
            modes.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)
        flock(file, kind)

    monkeypatch.setattr(fcntl, "flock", noted)
    storage.point_latest(tmp_path / "new")
    assert modes == [os.O_RDWR]


def test_a_holder_is_read_while_it_holds(tmp_path):
    ours = Holder.current(tmp_path)
    with hold(tmp_path / "lock", ours):
        assert holder_of(tmp_path / "lock") == ours
    assert holder_of(tmp_path / "lock") is None
    with storage.lock(tmp_path / "lock", wait=False):
        assert holder_of(tmp_path / "lock") == Holder()


def test_a_holder_that_is_about_to_release_is_not_taken_for_an_unknown_one(tmp_path, monkeypatch):
    """It has withdrawn its record, but not yet the lock."""
    with contextlib.ExitStack() as held:
        assert held.enter_context(storage.lock(tmp_path / "lock", wait=False))
        # It releases the lock as soon as somebody who has found no record waits.
        monkeypatch.setattr(holders, "time", SimpleNamespace(sleep=lambda _: held.close()))
        assert holder_of(tmp_path / "lock") is None


def test_facts_of_several_processes_are_merged(tmp_path):
    ours, theirs = FactCache(tmp_path / "facts.json"), FactCache(tmp_path / "facts.json")
    ours.put("a", 1)
    theirs.put("b", [2])
    ours.save()
    theirs.save()
    assert ours.get("a") == theirs.get("a") == 1
    again = FactCache(tmp_path / "facts.json")
    assert (again.get("a"), again.get("b"), again.get("c")) == (1, [2], None)
