"""Object stores: Amazon S3 and what speaks like it, Google Cloud Storage and Azure Blob Storage.

An address is `s3://bucket/key`, `gs://bucket/key` or `az://container/key`. Endpoint, region and
credentials come from the environment, as obstore and the stores' own tools name them, and nowhere
else. An object is there completely or not at all, so what is written last vouches for the rest.

Failures that may pass are repeated (`infini_model.runtime.store_client`). Every method raises
`UnreachableError` if the store stays away, and `StoreError` for what a retry cannot change: an
access denied, a missing bucket, a key that cannot be.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from infini_model.config.locations import STORES
from infini_model.runtime import storage
from infini_model.runtime.errors import (
    ObjectChangedError,
    ObjectDamagedError,
    ObjectMissingError,
    StoreError,
)
from infini_model.runtime.store_client import client, with_retries

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

PATIENCE = 60.0  # seconds
# What a download reads at once: an answer is held in memory.
REQUEST_BYTES = 16 << 20
# Beyond what is asked for, which is megabytes where text follows text, and a page of a footer.
READ_AHEAD_BYTES = 256 << 10
PART_BYTES = 16 << 20  # of an upload
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
# What an address with a signature has in its query.
SIGNATURE = re.compile(r"[?&](sig|se|sp|X-(Amz|Goog)-\w+|AWSAccessKeyId|Signature)=", re.IGNORECASE)


class Version(NamedTuple):
    """What a store calls the content of an object: its entity tag, and a number if it keeps any.

    S3's entity tag of a small object is a hash of its content: equal contents are equal versions.
    """

    etag: str | None
    number: str | None = None


class StoredObject(NamedTuple):
    """An object as its store lists it.

    `key` is relative to the store that listed it, `bytes` the size, `modified` the last write.
    """

    address: str
    key: str
    bytes: int
    version: Version
    modified: datetime


def split_address(address: str) -> tuple[str, str]:
    """The bucket, as an address, and the key, which may be empty or a glob.

    Raises `StoreError` for an unknown scheme, a missing bucket, credentials inside the address, and
    keys with an empty or dotted folder name, which obstore cannot express. No credentials are told.
    """
    scheme, rest = address[:5], address[5:]
    harmless = re.sub(r"://[^/]*@", "://…@", address.partition("?")[0])
    if scheme not in STORES:
        raise StoreError(f"{harmless}: unknown kind of address; takes {' '.join(STORES)}")
    bucket, _, key = rest.partition("/")
    if "@" in bucket or SIGNATURE.search(rest):
        raise StoreError(
            f"{harmless}: holds credentials; put them into the environment ({STORES[scheme]}…)"
        )
    if not bucket or glob.has_magic(bucket):
        raise StoreError(f"{address}: names no bucket")
    key = key.removesuffix("/")
    if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise StoreError(f"{address}: a key with an empty or dotted folder name cannot be read")
    return f"{scheme}{bucket}", key


class ObjectStore:
    """The objects below an address, by their keys relative to it.

    It is only its address and may be shared by threads, pickled and sent to a spawned process; a
    forked process must not use it. `patience` is how long a store may be away, in seconds.
    """

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self._root, self._prefix = split_address(address)
        self.address = address.rstrip("/")
        self._patience = patience

    def address_of(self, key: str) -> str:
        path = self._path(key)
        return f"{self._root}/{path}" if path else self._root

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key) if part)

    def _request(self, key: str, request: Callable[[Any], T]) -> T:
        """What `request` returns, given obstore's client of the bucket."""
        root, patience = self._root, self._patience
        return with_retries(self.address_of(key), patience, lambda: request(client(root, patience)))

    def visit_below(self, folder: str, visit: Callable[[StoredObject], object]) -> None:
        """Call `visit` with each object below a folder, in no order.

        After a listing that was cut it is called with those that have been listed once more.
        """

        def request(store: Any) -> None:
            # Page by page, as what obstore says of an object takes more memory than what is kept.
            for page in store.list(self._path(folder) or None, chunk_size=1000):
                for each in page:
                    visit(self._stored(each))

        self._request(folder, request)

    def list_below(self, folder: str = "") -> list[StoredObject]:
        """All objects below a folder, sorted by address.

        Empty objects that only mark a folder, in which there are others, are left out.
        """
        found: dict[str, StoredObject] = {}
        self.visit_below(folder, lambda each: found.update({each.address: each}))
        folders = {each[: slash.start()] for each in found for slash in re.finditer("/", each)}
        return [found[each] for each in sorted(found) if found[each].bytes or each not in folders]

    def folders(self) -> list[str]:
        """The names of the folders right below the address; what is in them is not listed."""
        path = self._path("") or None

        def request(store: Any) -> list[str]:
            return list(store.list_with_delimiter(path)["common_prefixes"])

        return sorted(each.rpartition("/")[2] for each in self._request("", request))

    def _stored(self, described: dict[str, Any]) -> StoredObject:
        path = described["path"]
        return StoredObject(
            f"{self._root}/{path}",
            path.removeprefix(self._prefix).lstrip("/"),
            described["size"],
            _version(described),
            described["last_modified"],
        )

    def find(self, key: str) -> StoredObject | None:
        """The object `key` as it is now, or None if there is none."""
        path = self._path(key)
        # The answer to HEAD has no body, which would tell a missing bucket from a missing object.
        for request in (lambda store: store.head(path), lambda store: store.get(path).meta):
            with contextlib.suppress(ObjectMissingError):
                return self._stored(self._request(key, request))
        return None

    def read(self, key: str) -> tuple[bytes, Version]:
        """The content of a small object, and its version. Raises `ObjectMissingError`."""

        def request(store: Any) -> tuple[bytes, Version]:
            result = store.get(self._path(key))
            return bytes(result.bytes()), _version(result.meta)

        return self._request(key, request)

    def read_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        """The bytes from `start` to `stop` (exclusive) of an object that is still of this version.

        Raises `ObjectChangedError` if it is not or is shorter, `ObjectMissingError` if it is gone.
        """
        options: dict[str, Any] = {"if_match": version.etag} if version.etag else {}

        def request(store: Any) -> bytes:
            result = store.get(self._path(key), options=options | {"range": (start, stop)})
            content = bytes(result.bytes())
            # There are servers that do not honour conditions.
            is_other = version.etag is not None and _version(result.meta).etag != version.etag
            if is_other or len(content) < stop - start:
                raise _changed(self.address_of(key))
            return content

        return self._request(key, request) if stop > start else b""

    def open(self, key: str, size: int, version: Version) -> pa.NativeFile:
        """Open an object of `size` bytes for reading at random positions, without loading it.

        Sequential reads are read ahead. What is read is of this version: a read raises
        `ObjectChangedError` if the object was overwritten, `ObjectMissingError` if it was deleted.
        """
        import pyarrow as pa  # a large library, which listing runs does not need
        from fsspec.spec import AbstractBufferedFile

        # Of an empty object nothing will be read, so nothing else would notice.
        if not size and self._existing(key).bytes:
            raise _changed(self.address_of(key))

        def read(key: str, start: int, end: int) -> bytes:
            return self.read_range(key, start, end, version)

        # All that it needs of a file system.
        files = SimpleNamespace(cat_file=read)
        file = AbstractBufferedFile(files, key, size=size, block_size=READ_AHEAD_BYTES)
        return pa.PythonFile(file, mode="r")

    def download(self, key: str, path: Path, sha256: str | None = None) -> None:
        """Copy an object to a local file, atomically, and all of it of one version.

        Raises `ObjectMissingError`, `ObjectChangedError`, `ObjectDamagedError` if its SHA-256 is
        not the given one, and `UserError` if the disk is full.
        """
        with storage.atomic_file(path) as temporary, temporary.open("wb") as file:
            found, digest = self._existing(key), hashlib.sha256()
            for start in range(0, found.bytes, REQUEST_BYTES):
                stop = min(start + REQUEST_BYTES, found.bytes)
                piece = self.read_range(key, start, stop, found.version)
                digest.update(piece)
                file.write(piece)
            if sha256 not in (None, actual := digest.hexdigest()):
                what = f"is damaged: SHA-256 {actual}, not {sha256}"
                raise ObjectDamagedError(f"{found.address}: {what}")

    def _existing(self, key: str) -> StoredObject:
        found = self.find(key)
        if found is None:
            raise ObjectMissingError(f"{self.address_of(key)}: not found")
        return found

    def write(self, key: str, content: bytes) -> Version:
        """Write a small object, over what is there."""
        path = self._path(key)
        return _version(
            self._request(key, lambda store: store.put(path, content, use_multipart=False))
        )

    def upload(self, key: str, path: Path) -> Version:
        """Copy a local file to an object, over what is there, in parts if it is large.

        Raises `OSError` if the file cannot be read.
        """

        def request(store: Any) -> Any:
            with path.open("rb") as file:
                part = max(PART_BYTES, path.stat().st_size // MAX_PARTS + 1)
                return store.put(
                    self._path(key), file, chunk_size=part, max_concurrency=PARTS_AT_ONCE
                )

        return _version(self._request(key, request))

    def write_if(self, key: str, content: bytes, expected: Version | None) -> Version | None:
        """Write a small object over one of the expected version, or where None is there.

        Returns None if there is another, or it is gone. Of several writers at most one succeeds, as
        long as their contents differ (see `Version`): a writer whose connection was cut after the
        store had already accepted the object recognises its content.
        """
        mode: Any = "create"
        if expected is not None:
            fields = {"e_tag": expected.etag, "version": expected.number}
            mode = {name: value for name, value in fields.items() if value is not None}

        def request(store: Any) -> Version | None:
            from obstore.exceptions import AlreadyExistsError, PreconditionError

            try:
                written = store.put(self._path(key), content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                # obstore may have sent it twice, as the first answer did not arrive. No other
                # writer has this content.
                there, version = self.read(key)
                return version if there == content else None
            return _version(written)

        with contextlib.suppress(ObjectMissingError):  # what Amazon says of one that is gone
            return self._request(key, request)
        return None

    def honours_conditions(self) -> bool:
        """Whether the store refuses to overwrite what `write_if` must not."""
        key = f".conditions-{uuid.uuid4().hex}"
        try:
            first = self.write_if(key, b"1", None)
            if first is None or self.write_if(key, b"2", None) is not None:
                return False
            is_replaced = self.write_if(key, b"3", first) is not None
            return is_replaced and self.write_if(key, b"4", first) is None
        finally:
            self.delete([key])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        paths = [self._path(key) for key in keys]

        def delete(paths: list[str]) -> None:
            self._request("", lambda store: store.delete(paths))

        try:
            delete(paths)
        except ObjectMissingError:
            # Google's and Azure's stores stop at what is not there.
            for path in paths:
                with contextlib.suppress(ObjectMissingError):
                    delete([path])


def _changed(address: str) -> ObjectChangedError:
    return ObjectChangedError(f"{address}: changed while it was read; run again")


def _version(described: Any) -> Version:
    # A multipart upload answers "null" from a bucket that keeps no versions.
    number = described["version"]
    etag = described["e_tag"]
    # Azure quotes entity tags in some of its answers only.
    quoted = None if etag is None else '"' + etag.strip('"') + '"'
    return Version(quoted, None if number == "null" else number)


def matching(pattern: str) -> list[StoredObject]:
    """The objects that an address or a glob matches, sorted by address.

    A glob matches what it would match on a disk (`glob.glob`, recursive): `*` within one folder
    name, `**` any number of folders, neither what begins with a dot. An object of the very name
    goes first. All objects below the folders that stand before the first wildcard are listed.
    """
    from fsspec.utils import glob_translate

    root, key = split_address(pattern)
    store = ObjectStore(root)
    found = store.find(key) if "[" in key or (key and not glob.has_magic(key)) else None
    if found or not glob.has_magic(key):
        return [found] if found else []
    parts = key.split("/")
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    # fsspec refuses `**` as a part of a name, where it means the same as `*`.
    plain = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts]
    shape = re.compile(glob_translate("/".join(plain)))
    return [
        each
        for each in store.list_below("/".join(parts[:fixed]))
        # A hidden name is matched by a part of the pattern that begins with a dot, by no other.
        if shape.match(each.key) and _hidden(each.key) == _hidden(key)
    ]


def _hidden(key: str) -> int:
    return sum(part.startswith(".") for part in key.split("/"))
