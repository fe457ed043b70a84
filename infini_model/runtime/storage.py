"""Atomic files and folders, and locks that the kernel releases when their holder exits.

Results that are reused later are written under a temporary name beside their target, flushed to
disk, then renamed. A reader never sees a partial file, and a killed writer leaves only a `.tmp-`
name that the next writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infini_model.runtime.errors import UserError

TEMPORARY = ".tmp-"
# What a complete folder lists its files in; it is written last, and removed first.
MANIFEST = "manifest.json"
_encode_sorted = json.JSONEncoder(sort_keys=True).encode
SMALL_BYTES = 1 << 17
# `is_locked` holds a lock for a moment; whoever takes one without waiting tries again.
TRIES = 3
PAUSE_SECONDS = 0.02
# Another disk, a file system without hard links, or a file that may have no more of them.
UNLINKABLE = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
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
    """Turn a full disk or missing permission into a `UserError` that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full; no partial file was kept") from error
        if error.errno in UNWRITABLE:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        raise


def make_folder(path: Path) -> Path:
    """Create `path` and its parents and return it. Raises `UserError` if that is impossible."""
    with named_os_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # in /proc, for example
            raise UserError(f"{path}: cannot be created") from error
    return path


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place when the block succeeds.

    The file has the permissions `mode` from the start, before it has any content.

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
    """Yield a temporary folder beside `path`; rename it into place when the block succeeds.

    Every file in it is flushed to disk first. An existing folder at `path` is replaced.

    Raises `UserError` if the disk is full or the folder cannot be written.
    """
    make_folder(path.parent)
    with named_os_errors(path):
        name = tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent)
        temporary = Path(name)
        temporary.chmod(0o755)
        try:
            yield temporary
            for entry in [*temporary.rglob("*"), temporary]:
                # A hard link is to a file that is on the disk already.
                if entry.is_dir() or entry.stat().st_nlink == 1:
                    _sync(entry)
            retired = retire(path) if path.exists() else None
            os.rename(temporary, path)
            _sync(path.parent)
            if retired is not None:
                shutil.rmtree(retired, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete temporary names left in `folder` by killed writers, only of target `name` if given.

    Call it while nobody writes there: under the lock that the writers acquire.
    """
    pattern = f"{TEMPORARY}*" if name is None else f"{TEMPORARY}{glob.escape(name)}-*"
    for path in folder.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def link(source: Path | str, target: Path | str) -> None:
    """Hard-link the file if that is possible, copy it otherwise. Raises `OSError`."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        shutil.copy2(source, target)  # with the time at which it was written


def retire(path: Path) -> Path:
    """Rename what is about to be deleted to a temporary name, so that a kill leaves no half of it.

    Needs no space on a full disk. Raises `OSError`.
    """
    retired = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    os.rename(path, retired)
    return retired


def dump_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON into a folder under construction. Raises `OSError`."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic_file(path) as temporary:
        dump_json(temporary, value)


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_bytes()))
    return {}


def point_latest(folder: Path) -> None:
    """Point the symbolic link `latest` beside `folder` to it, atomically. Raises `UserError`."""
    with lock(folder.parent / ".latest.lock"), named_os_errors(folder.parent / "latest"):
        remove_leftovers(folder.parent, "latest")
        link = folder.parent / f"{TEMPORARY}latest-{os.getpid()}"
        link.symlink_to(folder.name)
        os.replace(link, folder.parent / "latest")


def sha256(path: Path | str) -> str:
    """SHA-256 of a file in hexadecimal, as `sha256sum` prints it."""
    with open(path, "rb") as file:  # noqa: PTH123
        # For thousands of small files, allocating a buffer each takes longer than reading them.
        head = file.read(SMALL_BYTES)
        if len(head) < SMALL_BYTES:
            return hashlib.sha256(head).hexdigest()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_key(tree: Any) -> str:
    """The SHA-256, in hexadecimal, of a JSON tree whose objects are sorted by key.

    Equal trees have equal keys on every machine, so that a key can name a file or a folder.
    """
    return hashlib.sha256(_encode_sorted(tree).encode()).hexdigest()


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path`; yields False if `wait` is false and it is held.

    Holders of a `shared` lock exclude those of an exclusive one, but not each other. The kernel
    releases a lock when the process exits, even if it is killed. Child processes do not inherit it.

    Whoever holds the exclusive lock may delete the file: those who wait for it take a new one.
    """
    descriptor = take_lock(path, wait=wait, shared=shared)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def take_lock(path: Path, *, wait: bool = True, shared: bool = False) -> int | None:
    """Take the lock `path` as `lock` does; returns the open file that holds it until it is closed.

    None if `wait` is false and the lock is held.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        make_folder(path.parent)
        with named_os_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(os.close, descriptor)
            if not _flock(descriptor, kind, TRIES):
                return None
            if _is_at(path, descriptor):
                unless_taken.pop_all()
                return descriptor


def _flock(descriptor: int, kind: int, tries: int = 1) -> bool:
    for left in reversed(range(tries)):
        try:
            fcntl.flock(descriptor, kind)
        except BlockingIOError:
            if left:
                time.sleep(PAUSE_SECONDS)
        else:
            return True
    return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether somebody holds the exclusive lock `path` now. Creates nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
