"""Files at HTTP and other addresses, through `fsspec`: downloaded once, resumed where they ended.

A file is downloaded to `<raw>/<key>/<name>.partial` and renamed once it has the size that the
server announced. The key is a hash of the address and of what identifies the content according to
the server (entity tag, else date and size), so that a changed file is a new file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from infini_model.data.sources.files import brief
from infini_model.data.sources.formats import check_format, codec_of
from infini_model.data.sources.text import CODECS
from infini_model.runtime import storage
from infini_model.runtime.errors import BUSY, DataError, UnreachableError
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
CONNECT_TIMEOUT = 30.0  # seconds
READ_TIMEOUT = 60.0
HTTP = ("http://", "https://")
IDENTITY_FIELDS = ("ETag", "etag", "Content-MD5", "Last-Modified", "LastModified", "mtime")


class _Remote(NamedTuple):
    """A remote file: its file system, its path there, its size if known, its local file."""

    address: str
    system: Any
    path: str
    size: int | None
    target: Path


def fetch_files(
    addresses: Sequence[str],
    raw_dir: Path,
    given: str | None = None,
    progress: OnProgress | None = None,
) -> list[Path]:
    """Download the files at these addresses into `raw_dir`, unless they are there already.

    `given` is the format of the files; by default suffixes tell it.

    Raises `DataError` for an address that is refused, not found or of an unsupported format,
    `UnreachableError` for a host that does not answer, `UserError` on a full disk.
    """
    remotes = [_resolve(address, raw_dir, given) for address in addresses]
    total = sum(remote.size or 0 for remote in remotes)
    done = 0
    for remote in remotes:
        for count in _download(remote):
            done += count
            if progress is not None:
                progress(done, max(done, total))
    return [remote.target for remote in remotes]


def _resolve(address: str, raw_dir: Path, given: str | None) -> _Remote:
    """Return the file at an address, as the server describes it."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address, **_options(address))
    except (ImportError, ValueError) as error:
        raise DataError(f"{address}: cannot be read: {error}") from error
    name = system.unstrip_protocol(path)
    file = Path(unquote(urlsplit(name).path)).name
    check_format(file, given, name)
    with _reachable(name):
        info = system.info(path)
    identity = [name, info.get("size"), *(str(info.get(field)) for field in IDENTITY_FIELDS)]
    key = storage.content_key(identity)[:32]
    return _Remote(name, system, path, info.get("size"), raw_dir / key / file)


def _options(address: str) -> dict[str, Any]:
    """For HTTP: proxies from the environment, no total timeout, the bytes as stored."""
    if not address.startswith(HTTP):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
    headers = {"Accept-Encoding": "identity"}
    client = {"timeout": timeout, "trust_env": True, "auto_decompress": False, "headers": headers}
    return {"client_kwargs": client}


def _download(remote: _Remote) -> Iterator[int]:
    """Download one file; yields the bytes as they arrive, first those of earlier attempts."""
    folder, size = storage.make_folder(remote.target.parent), remote.size
    with storage.lock(folder / ".lock"), storage.named_os_errors(remote.target):
        if remote.target.is_file():
            yield remote.target.stat().st_size
            return
        partial = folder / f"{remote.target.name}.partial"
        with partial.open("ab") as file:
            if size == file.tell():  # killed before it was renamed
                yield size
            else:
                yield from _copy(remote, file)
            os.fsync(file.fileno())
        there = partial.stat().st_size
        if size not in (None, there):
            partial.unlink()
            raise UnreachableError(f"{remote.address}: downloaded {there} bytes, expected {size}")
        os.replace(partial, remote.target)
    log.info("%s: downloaded, %d bytes", remote.address, there)


def _copy(remote: _Remote, file: Any) -> Iterator[int]:
    """Append what is missing, or write the file anew if the server does not send ranges."""
    start = file.tell()
    with _reachable(remote.address):
        if remote.address.startswith(HTTP):
            headers = {"Range": f"bytes={start}-"} if start else {}
            source = remote.system.open(
                remote.path, "rb", block_size=0, size=remote.size, headers=headers
            )
            start = start if source.r.status == 206 else 0
            # As a name such as a.jsonl.gz says, too, or else although it was not asked for.
            encoding = source.r.headers.get("Content-Encoding") or "identity"
            if encoding not in ("identity", CODECS.get(codec_of(remote.target.name))):
                why = f"is sent compressed (Content-Encoding: {encoding}); download it yourself"
                raise DataError(f"{remote.address}: {why}")
        else:
            source = remote.system.open(remote.path, "rb", block_size=CHUNK_BYTES)
            source.seek(start)
    with contextlib.closing(source):
        file.truncate(start)
        yield start
        while True:
            with _reachable(remote.address):
                chunk = source.read(CHUNK_BYTES)
            if not chunk:
                return
            file.write(chunk)
            # Written before the next wait, so that a killed download resumes from here.
            file.flush()
            yield len(chunk)


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[None]:
    """Tell a refusal, which is final, from a host that does not answer, which is worth a retry."""
    from aiohttp import ClientError

    try:
        yield
    except Exception as error:
        # When asked for a file's size, fsspec raises FileNotFoundError for every failure; the real
        # one is its cause.
        is_wrapped = isinstance(error, FileNotFoundError) and error.__cause__ is not None
        cause = error.__cause__ if is_wrapped else error
        status = getattr(cause, "status", None)
        if isinstance(status, int) and 400 <= status < 500 and status not in BUSY:
            reason = "not found" if status in (404, 410) else getattr(cause, "message", "refused")
            raise DataError(f"{address}: {reason} (HTTP {status})") from error
        if isinstance(cause, FileNotFoundError):
            raise DataError(f"{address}: not found") from error
        if isinstance(cause, PermissionError):
            raise DataError(f"{address}: access denied") from error
        if not isinstance(cause, (OSError, EOFError, ClientError)):
            raise
        raise UnreachableError(f"{address}: cannot be reached: {brief(cause)}") from error
