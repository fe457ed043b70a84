"""Files at HTTP addresses, downloaded once, resumed where they ended.

A file is downloaded to `<raw>/<key>/<name>.partial` and renamed once it has the size that the
server announced. The key is a hash of the address and of what identifies the content according to
the server (entity tag, else date and size), so that a changed file is a new file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import httpx

from infini_model.data.sources.files import brief
from infini_model.data.sources.formats import check_format, codec_of
from infini_model.data.sources.text import CODECS
from infini_model.runtime import storage
from infini_model.runtime.errors import BUSY, DataError, UnreachableError, UserError
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

# What is lost of a download when its connection breaks, at most.
CHUNK_BYTES = 1 << 18
CONNECT_TIMEOUT = 30.0  # seconds
READ_TIMEOUT = 60.0
IDENTITY_FIELDS = ("ETag", "Content-MD5", "Last-Modified")


class _Remote(NamedTuple):
    """A remote file: its size, if that is known, and its local file."""

    address: str
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
    done = 0
    with _client() as client:
        remotes = [_resolve(client, address, raw_dir, given) for address in addresses]
        total = sum(remote.size or 0 for remote in remotes)
        for remote in remotes:
            for count in _download(client, remote):
                done += count
                if progress is not None:
                    progress(done, max(done, total))
    return [remote.target for remote in remotes]


def _client() -> httpx.Client:
    """Make a client with the proxies of the environment and the passwords of `~/.netrc`."""
    passwords = Path("~/.netrc").expanduser()
    try:
        return httpx.Client(
            auth=httpx.NetRCAuth(str(passwords)) if passwords.is_file() else None,
            verify=ssl.create_default_context(),
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT),
            follow_redirects=True,
        )
    except (ImportError, ValueError) as error:
        raise UserError(f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY: {brief(error)}") from error


def _resolve(client: httpx.Client, address: str, raw_dir: Path, given: str | None) -> _Remote:
    """Return the file at an address, as the server describes it."""
    with _reachable(address):
        name = Path(httpx.URL(address).path).name
        check_format(name, given, address)
        answer = client.head(address)
        if answer.is_error:  # as where an address is signed for one method
            with client.stream("GET", address) as answer:
                answer.raise_for_status()
    headers = answer.headers
    is_plain = headers.get("Content-Encoding", "identity") == "identity"
    size = int(headers["Content-Length"]) if is_plain and "Content-Length" in headers else None
    identity = [address, size, *(headers.get(field) for field in IDENTITY_FIELDS)]
    return _Remote(address, size, raw_dir / storage.content_key(identity)[:32] / name)


def _download(client: httpx.Client, remote: _Remote) -> Iterator[int]:
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
                yield from _copy(client, remote, file)
            os.fsync(file.fileno())
        there = partial.stat().st_size
        if size not in (None, there):
            partial.unlink()
            raise UnreachableError(f"{remote.address}: downloaded {there} bytes, expected {size}")
        os.replace(partial, remote.target)
    log.info("%s: downloaded, %d bytes", remote.address, there)


def _copy(client: httpx.Client, remote: _Remote, file: BinaryIO) -> Iterator[int]:
    """Append what is missing, or write the file anew if the server does not send ranges."""
    start = file.tell()
    headers = {"Range": f"bytes={start}-"} if start else {}
    with (
        _reachable(remote.address),
        client.stream("GET", remote.address, headers=headers) as answer,
    ):
        answer.raise_for_status()
        # As a name such as a.jsonl.gz says, too, or else although it was not asked for.
        encoding = answer.headers.get("Content-Encoding") or "identity"
        if encoding not in ("identity", CODECS.get(codec_of(remote.target.name))):
            why = f"is sent compressed (Content-Encoding: {encoding}); download it yourself"
            raise DataError(f"{remote.address}: {why}")
        start = start if answer.status_code == 206 else 0
        file.truncate(start)
        yield start
        for chunk in answer.iter_raw(CHUNK_BYTES):
            file.write(chunk)
            # Written before the next wait, so that a killed download resumes from here.
            file.flush()
            yield len(chunk)


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[None]:
    """Tell a refusal, which is final, from a host that does not answer, which is worth a retry."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status, reason = error.response.status_code, error.response.reason_phrase
        if not 400 <= status < 500 or status in BUSY:
            raise UnreachableError(f"{address}: cannot be reached: {status} {reason}") from error
        reason = "not found" if status in (404, 410) else reason or "refused"
        raise DataError(f"{address}: {reason} (HTTP {status})") from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise DataError(f"{address}: cannot be read: {error}") from error
    except httpx.HTTPError as error:
        raise UnreachableError(f"{address}: cannot be reached: {brief(error)}") from error
