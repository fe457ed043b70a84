"""Files that are complete or absent, and locks that die with their holder.

What the project leaves on disk to be believed goes through here: written under a temporary name
beside its target, flushed to the disk, then renamed. A reader therefore never sees half a file, and
a killed writer leaves nothing but a `.tmp-` name that the next writer clears away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infini_model.runtime.errors import UserError

TEMPORARY = ".tmp-"
SMALL_BYTES = 1 << 17
UNWRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EFBIG}
)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full; nothing half-written was kept") from error
        if error.errno in UNWRITABLE:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        raise


def make_folder(path: Path) -> Path:
    """Create `path` and its parents. Raises `UserError` where that is not allowed."""
    with named_os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place when the block ends well.

    The file has the permissions `mode` from the start, before anything is in it.

    Raises `UserError` if the disk is full or the folder cannot be written.
    """
    make_folder(path.parent)
    with named_os_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY + path.name + "-", dir=path.parent)
        os.fchmod(descriptor, mode)
        os.close(descriptor)
        temporary = Path(name)
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; rename it into place when the block ends well.

    Every file in it is flushed first. A folder that stands at `path` is replaced.

    Raises `UserError` if the disk is full or the folder cannot be written.
    """
    make_folder(path.parent)
    with named_os_errors(path):
        prefix = f"{TEMPORARY}{path.name}-"
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
        temporary.chmod(0o755)
        try:
            yield temporary
            for entry in [*temporary.rglob("*"), temporary]:
                _sync(entry)
            if path.exists():
                retired = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
                os.rename(path, retired / "retired")
                os.rename(temporary, path)
                shutil.rmtree(retired, ignore_errors=True)
            else:
                os.rename(temporary, path)
            _sync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete what killed writers left in `folder`, all of it or that of the target `name`.

    Call it while no writer is at work there: under the lock that the writers take.
    """
    pattern = f"{TEMPORARY}*" if name is None else f"{TEMPORARY}{glob.escape(name)}-*"
    for path in folder.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def dump_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON into a folder that nobody sees yet. Raises `OSError`."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, complete or not at all."""
    with atomic_file(path) as temporary:
        dump_json(temporary, value)


def point_latest(folder: Path) -> None:
    """Make the symbolic link `latest` beside `folder` point at it, in one step."""
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        remove_leftovers(folder.parent, "latest")
        link = folder.parent / f"{TEMPORARY}latest-{os.getpid()}"
        link.symlink_to(folder.name)
        os.replace(link, folder.parent / "latest")
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes in hexadecimal, the same that `sha256sum` prints."""
    with path.open("rb") as file:
        # Thousands of small files: making a buffer for each would take longer than reading it.
        head = file.read(SMALL_BYTES)
        if len(head) < SMALL_BYTES:
            return hashlib.sha256(head).hexdigest()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_key(tree: Any) -> str:
    """The SHA-256, in hexadecimal, of a JSON tree whose objects are sorted by key.

    Equal trees have equal keys on every machine, so that a key can name a file or a folder.
    """
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path`; yields False if `wait` is false and it is taken.

    The kernel drops the lock when the process ends, however it ends, so that a killed holder
    blocks nobody. Children do not inherit it.
    """
    make_folder(path.parent)
    with named_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
