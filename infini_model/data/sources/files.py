"""The files of a source: what identifies their content, and opening them.

A file is listed once, by its fingerprint, and read later, perhaps on another machine. Its `version`
is what its store said when it was listed, so that a file that has changed since is never read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from infini_model.config.locations import is_store
from infini_model.runtime import storage
from infini_model.runtime.errors import BUSY, DataError, UnreachableError, UserError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.machine import available_cores
from infini_model.runtime.object_store import ObjectStore, Version, split_address
from infini_model.runtime.records import Record

HUB = "hf://datasets/"
PAUSES = (1, 2, 4, 8, 8)  # seconds, before a file is asked for again
LOGIN = "log in (hf auth login) or set HF_TOKEN"
# By the name of the hub's error, else by the HTTP status.
REFUSALS = {
    "GatedRepoError": f"is gated: ask for access on its page, then {LOGIN}",
    # The hub says 401 for a name that it does not know, since it may be private.
    "RepositoryNotFoundError": f"does not exist on the hub, or is private: {LOGIN}",
    "RevisionNotFoundError": "has no such revision",
    **dict.fromkeys(("401", "403"), f"access denied: {LOGIN}"),
    **dict.fromkeys(("404", "410"), "not found"),
}
# `datasets` raises ValueError for a wrong configuration, RuntimeError for a script.
MISTAKES = re.compile(r"BuilderConfig .* not found|Config name is missing|Dataset scripts are no")
# A file written this recently could be written again without another timestamp.
SETTLED_NANOSECONDS = 2_000_000_000


class SourceFile(Record):
    """A file of a source, as it was listed.

    Attributes:
        address: An absolute path, or an address such as `s3://bucket/key` or
            `hf://datasets/team/name@commit/path`.
        bytes: Size of the file.
        fingerprint: Identifies the content wherever the file lies, such as `sha256:…`; empty for a
            local file that was not read yet.
        version: Changes whenever the file at this address is written again.
    """

    address: str
    bytes: int
    fingerprint: str
    version: str


class FileRange(Record):
    """A part of a file that is read by itself: from `start` to `stop` (exclusive; None is the end).

    `format` is one of `formats.FORMATS`, with the codec of a compressed file behind a dot. The unit
    is what the format is cut by: row groups, or bytes, where a document belongs to the range in
    which it begins. Of row groups, no more than `rows` are read. The file is not needed `whole` if
    the rest of it is not read.
    """

    file: SourceFile
    format: str
    start: int = 0
    stop: int | None = None
    rows: int | None = None
    whole: bool = True

    @property
    def kind(self) -> str:
        """The format without its codec."""
        return self.format.partition(".")[0]

    @property
    def codec(self) -> str:
        """The codec of a file that is compressed, else an empty string."""
        return self.format.partition(".")[2]


class Listing(Record):
    """The files of all sources, each whole, by the names of these; see `named_sources`."""

    sources: dict[str, list[FileRange]]

    @property
    def ranges(self) -> list[FileRange]:
        """The files of all sources."""
        return [part for ranges in self.sources.values() for part in ranges]


def local_version(stat: os.stat_result) -> str:
    """Describe a local file by what changes whenever it is written: inode, size, mtime and ctime.

    All machines that see the file see the same; the number of its device is each machine's own.
    """
    fields = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return "-".join(map(str, fields))


def local_files(paths: Iterable[str]) -> list[SourceFile]:
    """Local files as they are now, unread. Raises `DataError` for one that is gone."""
    stats = ((path, _stat(path)) for path in paths)
    return [
        SourceFile(address=path, bytes=stat.st_size, fingerprint="", version=local_version(stat))
        for path, stat in stats
    ]


def fingerprint(files: Sequence[SourceFile], facts: FactCache) -> list[SourceFile]:
    """Files with the fingerprints that are missing: SHA-256, read only if that is no fact yet.

    Raises `DataError` that names an unreadable file.
    """
    known = {each.version: facts.get(each.version) for each in files if not each.fingerprint}
    new = [each for each in files if not each.fingerprint and known[each.version] is None]
    # To hand a small file to a thread takes longer than to read it.
    large = [each.address for each in new if each.bytes >= storage.SMALL_BYTES]
    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        read_by_threads = pool.map(_checksum, large)
        for each in new:
            is_large = each.bytes >= storage.SMALL_BYTES
            found = next(read_by_threads) if is_large else _checksum(each.address)
            known[each.version] = found
            stat = _stat(each.address)
            # Another write would surely change the timestamps, whose steps may be coarse.
            age = time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns)
            if age > SETTLED_NANOSECONDS and local_version(stat) == each.version:
                facts.put(each.version, found)
    return [
        each
        if each.fingerprint
        else each.model_copy(update={"fingerprint": f"sha256:{known[each.version]}"})
        for each in files
    ]


def _stat(path: str) -> os.stat_result:
    with file_errors(path):
        return os.stat(path)  # noqa: PTH116


def _checksum(path: str) -> str:
    with file_errors(path):
        return storage.sha256(path)


@contextlib.contextmanager
def open_source(file: SourceFile, whole: bool = True) -> Iterator[pa.NativeFile]:
    """Open a file for reading at random positions, without loading it.

    A file on the hub is fetched to the hub's cache first, unless it is not needed `whole`.

    Raises `OSError` if the file is gone, `DataError` that names it if it has changed since it was
    listed or while the block read it. Reading a remote file raises `DataError` or `StoreError` if
    that is refused or it has changed, `UnreachableError` if its host does not answer.
    """
    if file.address.startswith(HUB):
        # The address names a commit, so that what it holds never changes.
        if whole:
            with pa.OSFile(_fetch(file.address)) as opened:
                yield opened
        else:
            from huggingface_hub import HfFileSystem

            system = HfFileSystem()
            with hub_errors(file.address), system.open(file.address, cache_type="none") as remote:
                yield pa.PythonFile(remote, mode="r")
    elif is_store(file.address):
        bucket, key = split_address(file.address)
        with ObjectStore(bucket).open(key, file.bytes, Version(file.version or None)) as opened:
            yield opened
    else:
        with pa.OSFile(file.address, "rb") as opened:
            # Not of `opened`: a decompressing reader closes it, and pyarrow < 25 has no fileno.
            _check_version(file, os.stat(file.address))  # noqa: PTH116 -- half the time of a Path
            yield opened
            _check_version(file, os.stat(file.address))  # noqa: PTH116


def _fetch(address: str) -> str:
    """The path of the file at an address, in the hub's cache; the hub is asked for it once.

    Raises `DataError` if the file does not exist or access is denied, `UnreachableError` if the hub
    does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, hf_hub_download

    repository, _, place = address.removeprefix(HUB).partition("@")
    commit, _, path = place.partition("/")

    def fetch() -> str:
        with hub_errors(address), storage.named_os_errors(Path(constants.HF_HUB_CACHE)):
            return hf_hub_download(repository, path, repo_type="dataset", revision=commit)

    # The hub's client goes on after a broken connection, but gives up where the hub is busy.
    for pause in PAUSES:
        with contextlib.suppress(UnreachableError):
            return fetch()
        time.sleep(pause)
    return fetch()


def read_source(file: SourceFile) -> bytes:
    """The content of a file. Raises as `open_source` does."""
    if is_store(file.address) or file.address.startswith(HUB):
        with open_source(file) as opened:
            return bytes(opened.read())
    # Half the time of Arrow's file, which matters where each document is a file.
    with open(file.address, "rb", buffering=0) as local:  # noqa: PTH123
        _check_version(file, os.fstat(local.fileno()))
        content = local.readall()
        _check_version(file, os.fstat(local.fileno()))
    return content


def _check_version(file: SourceFile, stat: os.stat_result) -> None:
    if local_version(stat) != file.version:
        raise DataError(f"{file.address}: changed while it was read; run again")


@contextlib.contextmanager
def file_errors(address: str) -> Iterator[None]:
    """Turn errors of Arrow and of the operating system into one line that names the file."""
    try:
        yield
    except ConnectionError:
        raise  # worth a retry, and it names the address
    except FileNotFoundError as error:
        raise DataError(f"{address}: does not exist") from error
    except (pa.ArrowException, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = getattr(error, "strerror", None) or lines[0]
        if "requires too much memory" in reason:  # libzstd, of what `zstd --long=28` and more makes
            reason += "; compress it again: zstd -d --long=31 < old | zstd > new"
        raise DataError(f"{address}: cannot be read: {reason}") from error


@contextlib.contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Tell a refusal, which is final, from a hub that does not answer, which is worth a retry.

    Raises `DataError` and `UnreachableError` in one line that starts with `what`. What neither the
    hub nor `datasets` says of a name or a file is raised as it is.
    """
    try:
        yield
    except (UserError, UnreachableError):
        raise
    except Exception as error:
        from huggingface_hub.errors import HfHubHTTPError

        # The HTTP client has changed between versions; its base error is the base of this one.
        network_error = HfHubHTTPError.__bases__[0]
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            known = REFUSALS.get(type(error).__name__) or REFUSALS.get(str(status))
            is_final = 400 <= status < 500 and status not in BUSY
            reason = f"{known} (HTTP {status})" if known else f"HTTP {status}"
        else:
            is_final, reason = _is_mistake(error), brief(error)
        if is_final:
            raise DataError(f"{what}: {reason}") from error
        if isinstance(error, (OSError, network_error)):
            raise UnreachableError(f"{what}: the hub cannot be reached: {reason}") from error
        raise


def _is_mistake(error: Exception) -> bool:
    """Tell if an error says what is wrong with a name, a dataset or a file."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    kinds = (HFValidationError, FileNotFoundError, pa.ArrowInvalid, UnicodeDecodeError)
    return (
        # A file that is not in the cache, but may be on a hub that does not answer.
        (isinstance(error, kinds) and not isinstance(error, LocalEntryNotFoundError))
        # Arrow's error for a damaged file; those of a system have a number, the hub's a type.
        or (type(error) is OSError and error.errno is None)
        or type(error).__module__ == "datasets.exceptions"
        or MISTAKES.match(str(error)) is not None
    )


def brief(error: Exception) -> str:
    """An error in one line, without the queries of addresses: a signed address is a key."""
    # `datasets` says in its second line which configurations there are.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    return re.sub(r"(https?://[^\s'\"?]*)\?[^\s'\"]*", r"\1", " ".join(lines)) or repr(error)
