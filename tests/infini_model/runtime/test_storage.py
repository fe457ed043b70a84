"""Files are complete or absent, and a lock is released when its holder exits."""

import hashlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from commands import PATIENCE, eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.runtime import storage
from infini_model.runtime.errors import UserError


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], text=True, capture_output=True
    )


class InterruptionError(Exception):
    pass


def interrupt(opened, name):
    """Start to write, then fail."""
    with opened as temporary:
        (temporary / name if name else temporary).write_text("half")
        raise InterruptionError


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "below" / "file.txt"
    with pytest.raises(InterruptionError):
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
    with pytest.raises(InterruptionError):
        interrupt(storage.atomic_folder(target), "new")
    assert [path.name for path in target.iterdir()] == ["old"]
    with storage.atomic_folder(target) as temporary:
        (temporary / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_leftovers_of_a_killed_writer_are_removed_by_name(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from infini_model.runtime import storage
with storage.atomic_folder(Path(sys.argv[1])) as temporary:
    (temporary / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(script, tmp_path / "a").returncode == -signal.SIGKILL
    assert run(script, tmp_path / "b").returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    storage.remove_leftovers(tmp_path, "a")
    assert len(list(tmp_path.iterdir())) == 1
    storage.remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    target = tmp_path / "big"
    script = """
import resource, sys
from pathlib import Path
from infini_model.runtime import storage
from infini_model.runtime.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with storage.atomic_file(Path(sys.argv[1])) as temporary:
        temporary.write_bytes(bytes(100_000))
except UserError as error:
    print(error)
"""
    line = run(script, target).stdout
    assert line.startswith(f"{target}: cannot be written")
    assert line.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_a_path_that_is_not_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        storage.make_folder(tmp_path / "file" / "below")


def test_a_killed_lock_holder_blocks_no_other_command(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from infini_model.runtime import storage
with storage.lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"True\n"
    with storage.lock(tmp_path / "lock", wait=False) as held:
        assert not held
    holder.kill()
    holder.communicate()
    with storage.lock(tmp_path / "lock", wait=False) as held:
        assert held


def test_latest_points_at_the_newest(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        storage.point_latest(tmp_path / name)
        assert (tmp_path / "latest").resolve() == tmp_path / name
        assert (tmp_path / "latest").readlink() == Path(name)


@settings(max_examples=20)
@given(data=st.binary(max_size=200))
def test_sha256_matches_hashlib(tmp_path_factory, data):
    path = Path(tmp_path_factory.mktemp("sha") / "file")
    path.write_bytes(data)
    assert storage.sha256(path) == hashlib.sha256(data).hexdigest()
    long = data + bytes(storage.SMALL_BYTES - len(data) // 2)
    path.write_bytes(long)
    assert storage.sha256(path) == hashlib.sha256(long).hexdigest()


def test_a_content_key_does_not_depend_on_the_order_of_keys():
    key = storage.content_key({"a": [1, "é", None], "b": 0.5})
    assert key == storage.content_key({"b": 0.5, "a": (1, "é", None)})
    assert key != storage.content_key({"b": 0.5, "a": ["é", 1, None]})
    assert len(key) == 64


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_who_waits_for_a_lock_whose_file_is_deleted_takes_the_new_one(
    tmp_path, monkeypatch, shared, again
):
    path = tmp_path / "below" / "lock"
    opened, end, flock = threading.Event(), threading.Event(), storage._flock

    def wait():
        with storage.lock(path, shared=shared):
            end.wait()

    def flock_of_an_open_file(descriptor, kind):
        opened.set()
        return flock(descriptor, kind)

    waiter = threading.Thread(target=wait, daemon=True)
    with storage.lock(path):
        monkeypatch.setattr(storage, "_flock", flock_of_an_open_file)
        waiter.start()
        assert opened.wait(PATIENCE)
        shutil.rmtree(path.parent)
        if again:
            with storage.lock(path, wait=False) as other:
                assert other
    eventually(lambda: storage.is_locked(path, shared=True), "the lock")
    with storage.lock(path, wait=False) as free:
        assert not free
    end.set()
    waiter.join()


def test_many_who_delete_the_file_of_a_lock_exclude_each_other(tmp_path):
    path, inside, entered = tmp_path / "lock", [], []

    def enter():
        for _ in range(100):
            with storage.lock(path):
                inside.append(1)
                entered.append(len(inside))
                inside.pop()
                path.unlink()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert entered == [1] * 400


def test_an_exclusive_lock_is_on_a_file_that_is_open_for_writing(tmp_path):
    """A network file system gives it on no other."""
    script = """
import fcntl, os, sys
from pathlib import Path
from infini_model.data.keeping.scratch import scratch_folder
from infini_model.runtime import storage

counted = []
def check(event, arguments):
    if event == "fcntl.flock" and arguments[1] & fcntl.LOCK_EX:
        counted.append(fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR)
sys.addaudithook(check)

folder = Path(sys.argv[1])
storage.point_latest(folder)
with storage.lock(folder / "lock", shared=True):
    assert storage.is_locked(folder / "lock", shared=True)
with scratch_folder(folder), scratch_folder(folder):
    print(counted)
"""
    (tmp_path / "new").mkdir()
    assert run(script, tmp_path / "new").stdout == f"{[True] * 6}\n"


def test_what_is_retired_is_a_leftover(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    assert (storage.retire(tmp_path / "folder") / "file").exists()
    assert not (tmp_path / "folder").exists()
    storage.remove_leftovers(tmp_path, "folder")
    assert list(tmp_path.iterdir()) == []
