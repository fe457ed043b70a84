"""Reading a file on the hub by ranges.

Each range is one request through the hub's own HTTP functions, which log in, follow redirects and
retry with growing pauses. `HfFileSystem` sends the same requests, but before the first range of a
file it also asks for the repository and lists the file's whole folder, in every process and thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pyarrow as pa

from infini_model.data.sources.hub.access import hub_errors
from infini_model.runtime.errors import DataError, UnreachableError
from infini_model.runtime.object_stores.ranged_file import Fetch, RangedFile

PREFIX = "hf://datasets/"
# Largest request: what is fetched again if the connection breaks.
PIECE_BYTES = 32 << 20
# Fetched at once of a file that is read from its beginning to its end, in small reads.
AHEAD_BYTES = 8 << 20
RETRIES = 5


def address_of(repository: str, commit: str, path: str) -> str:
    """The address of a file of a dataset repository at a commit, as `HfFileSystem` writes it."""
    return f"{PREFIX}{repository}@{commit}/{path}"


@contextlib.contextmanager
def open_file(address: str, size: int) -> Iterator[pa.NativeFile]:
    """Open a file of `size` bytes at an address of `address_of`, for reading at random positions.

    Of a Parquet file exactly what is read is fetched; other files are fetched in large blocks. Open
    it in the process that reads it: an open file does not survive a fork.

    Reading raises `DataError` if the file does not exist or access is denied,
    `UnreachableError` if the hub still does not answer after some retries.
    """
    ahead = 0 if address.lower().endswith(".parquet") else AHEAD_BYTES
    reader = RangedFile(_fetcher(address), size, (ahead, ahead))
    with pa.PythonFile(reader, mode="r") as opened:
        yield opened


def _fetcher(address: str) -> Fetch:
    from huggingface_hub import hf_hub_url

    parts = re.fullmatch(rf"{PREFIX}([^@]+)@([^/]+)/(.+)", address)
    if parts is None:
        raise DataError(f"{address}: is not the address of a file at a commit of the hub")
    repository, commit, path = parts.groups()
    url = hf_hub_url(repository, path, repo_type="dataset", revision=commit)

    def fetch(start: int, stop: int) -> bytes:
        pieces = range(start, stop, PIECE_BYTES)
        return b"".join(_fetch(address, url, at, min(stop, at + PIECE_BYTES)) for at in pieces)

    return fetch


def _fetch(address: str, url: str, start: int, stop: int) -> bytes:
    from huggingface_hub import constants

    # These names are loaded when they are first used, which mypy does not see.
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_backoff,
    )

    # Bytes as stored: a range of a compressed answer would be another range.
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    with hub_errors(address):
        answer = http_backoff(
            "GET",
            url,
            max_retries=RETRIES,
            headers=build_hf_headers() | headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )
        hf_raise_for_status(answer)
    # A server may ignore the range of a small file and send all of it.
    content: bytes = answer.content[start:stop] if answer.status_code == 200 else answer.content
    if len(content) != stop - start:
        raise UnreachableError(f"{address}: got {len(content)} bytes, expected {stop - start}")
    return content
