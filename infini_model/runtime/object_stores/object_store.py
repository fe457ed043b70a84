"""Object stores: Amazon S3 and what speaks like it, Google Cloud Storage and Azure Blob Storage.

An address is `s3://bucket/key`, `gs://bucket/key` or `az://container/key`. Endpoint, region and
credentials come from the environment, as obstore and the stores' own tools name them, and nowhere
else. An object is there completely or not at all, so what is written last vouches for the rest.

Failures that may pass are repeated; see `requests` beside this module. Every method raises
`UnreachableError` if the store stays away, and `StoreError` for what a retry cannot change: an
access denied, a missing bucket, a key that cannot be.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from infini_model.config.locations import STORES
from infini_model.runtime import storage
from infini_model.runtime.errors import (
    ObjectChangedError,
    ObjectDamagedError,
    ObjectMissingError,
    StoreError,
)
from infini_model.runtime.object_stores.ranged_file import RangedFile
from infini_model.runtime.object_stores.requests import VARIABLES, client, persist

T = TypeVar("T")

PATIENCE = 60.0  # seconds
# One request reads at most this much: what is cut is read again, and an answer is held in memory.
REQUEST_BYTES = 16 << 20
READ_AHEAD = (64 << 10, 8 << 20)  # bytes, after a jump and in a long sequential read
PART_BYTES = 16 << 20  # of an upload
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
DELETED_AT_ONCE = 1000
# What an address with a signature has in its query.
SIGNATURE = re.compile(r"[?&](sig|se|sp|X-(Amz|Goog)-\w+|AWSAccessKeyId|Signature)=", re.IGNORECASE)


class Version(NamedTuple):
    """What a store calls the content of an object: its entity tag, and a number if it keeps any.

    S3's entity tag of a small object is a hash of its content: equal contents are equal versions.
    """

    etag: str | None
    number: str | None = None


@dataclass(frozen=True)
class StoredObject:
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
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in VARIABLES:
        raise StoreError(f"{_harmless(address)}: unknown kind of address; takes {' '.join(STORES)}")
    bucket, _, key = rest.partition("/")
    if "@" in bucket or SIGNATURE.search(rest):
        raise StoreError(
            f"{_harmless(address)}: holds credentials; put them into the environment"
            f" ({VARIABLES[scheme]}…)"
        )
    if not bucket or glob.has_magic(bucket):
        raise StoreError(f"{address}: names no bucket")
    key = key.removesuffix("/")
    if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise StoreError(f"{address}: a key with an empty or dotted folder name cannot be read")
    return f"{scheme}://{bucket}", key


def _harmless(address: str) -> str:
    """An address without the parts that can hold credentials."""
    return re.sub(r"://[^/]*@", "://…@", address.partition("?")[0])


def locate(address: str) -> tuple[ObjectStore, str]:
    """The store of an object's bucket, and its key there. Raises `StoreError`."""
    root, key = split_address(address)
    if not key:
        raise StoreError(f"{address}: names a bucket, not an object")
    return ObjectStore(root), key


class ObjectStore:
    """The objects below an address, by their keys relative to it.

    It is only its address and may be shared by threads, pickled and sent to a spawned process; a
    forked process must not use it. `patience` is how long a store may be away, in seconds.
    """

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        self._root, self._prefix = split_address(address)
        self.address = address.rstrip("/")
        self._patience = patience

    def __repr__(self) -> str:
        return f"ObjectStore({self.address!r})"

    def address_of(self, key: str) -> str:
        path = self._path(key)
        return f"{self._root}/{path}" if path else self._root

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key) if part)

    def _request(self, key: str, request: Callable[[Any], T], retry_seconds: float = 0.0) -> T:
        """What `request` returns, given obstore's client of the bucket."""
        return persist(
            self.address_of(key),
            self._patience,
            lambda: request(client(self._root, retry_seconds)),
        )

    def list_below(self, folder: str = "") -> list[StoredObject]:
        """All objects below a folder, sorted by address.

        Empty objects that only mark a folder, in which there are others, are left out.
        """
        path = self._path(folder) or None

        def request(store: Any) -> list[StoredObject]:
            # Page by page, as what obstore says of an object takes more memory than what is kept.
            pages = store.list(path, chunk_size=1000)
            return [self._stored(each) for page in pages for each in page]

        listed = self._request(folder, request)
        if not all(each.bytes for each in listed):
            folders = _folders(each.address for each in listed)
            listed = [each for each in listed if each.bytes or each.address not in folders]
        return sorted(listed, key=lambda each: each.address)

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
        with contextlib.suppress(ObjectMissingError):
            return self._stored(self._request(key, lambda store: store.head(path)))
        # The answer to HEAD has no body, which would tell a missing bucket from a missing object.
        with contextlib.suppress(ObjectMissingError):
            return self._stored(self._request(key, lambda store: store.get(path).meta))
        return None

    def read(self, key: str) -> tuple[bytes, Version]:
        """The content of a small object, and its version. Raises `ObjectMissingError`."""

        def request(store: Any) -> tuple[bytes, Version]:
            result = store.get(self._path(key))
            return bytes(result.bytes()), _version(result.meta)

        return self._request(key, request)

    def read_beginning(self, key: str, count: int) -> tuple[bytes, StoredObject]:
        """The first `count` bytes of an object, fewer if it is shorter, and what it is, at once.

        Raises `ObjectMissingError`, `StoreError` if the object is empty.
        """
        path = self._path(key)

        def request(store: Any) -> tuple[bytes, StoredObject]:
            result = store.get(path, options={"range": (0, count)})
            return bytes(result.bytes()), self._stored(result.meta)

        return self._request(key, request)

    def read_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        """The bytes from `start` to `stop` (exclusive) of an object that is still of this version.

        Raises `ObjectChangedError` if it is not or is shorter, `ObjectMissingError` if it is gone.
        """
        options: dict[str, Any] = {"if_match": version.etag} if version.etag else {}

        def piece(begin: int) -> bytes:
            end = min(begin + REQUEST_BYTES, stop)

            def request(store: Any) -> bytes:
                result = store.get(self._path(key), options=options | {"range": (begin, end)})
                content = bytes(result.bytes())
                # There are servers that do not honour conditions.
                if (
                    _version(result.meta).etag != version.etag is not None
                    or len(content) < end - begin
                ):
                    raise _changed(self.address_of(key))
                return content

            return self._request(key, request)

        pieces = [piece(begin) for begin in range(start, stop, REQUEST_BYTES)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def open(self, key: str, size: int, version: Version) -> pa.NativeFile:
        """Open an object of `size` bytes for reading at random positions, without loading it.

        Sequential reads are read ahead. What is read is of this version: a read raises
        `ObjectChangedError` if the object was overwritten, `ObjectMissingError` if it was deleted.
        """
        # Of an empty object nothing will be read, so nothing else would notice.
        if not size and self._existing(key).bytes:
            raise _changed(self.address_of(key))

        def fetch(start: int, stop: int) -> bytes:
            return self.read_range(key, start, stop, version)

        return pa.PythonFile(RangedFile(fetch, size, READ_AHEAD), mode="r")

    def download(self, key: str, path: Path, sha256: str | None = None) -> str:
        """Copy an object to a local file, atomically; returns its SHA-256.

        Raises `ObjectMissingError`, `ObjectDamagedError` if its SHA-256 is not the given one,
        `UserError` if the disk is full.
        """
        found = self._existing(key)
        digest = hashlib.sha256()
        with storage.atomic_file(path) as temporary, temporary.open("wb") as file:
            for piece in self._pieces(key, found):
                digest.update(piece)
                file.write(piece)
            file.flush()
            if sha256 not in (None, digest.hexdigest()):
                actual = digest.hexdigest()
                message = f"{found.address}: is damaged: SHA-256 {actual}, not {sha256}"
                raise ObjectDamagedError(message)
        return digest.hexdigest()

    def sha256(self, key: str) -> str:
        """The SHA-256 of an object, which is read as a whole. Raises `ObjectMissingError`."""
        digest = hashlib.sha256()
        for piece in self._pieces(key, self._existing(key)):
            digest.update(piece)
        return digest.hexdigest()

    def _existing(self, key: str) -> StoredObject:
        found = self.find(key)
        if found is None:
            raise ObjectMissingError(f"{self.address_of(key)}: not found")
        return found

    def _pieces(self, key: str, found: StoredObject) -> Iterator[bytes]:
        """The content of an object that is still as it was found; raises as `read_range` does."""
        for start in range(0, found.bytes, REQUEST_BYTES):
            stop = min(start + REQUEST_BYTES, found.bytes)
            yield self.read_range(key, start, stop, found.version)

    def write(self, key: str, content: bytes) -> Version:
        """Write a small object, over what is there."""
        path = self._path(key)
        return _version(
            self._request(key, lambda store: store.put(path, content, use_multipart=False))
        )

    def upload(self, key: str, path: Path) -> Version:
        """Copy a local file to an object, over what is there.

        A part that fails is sent again; if obstore gives it up, the file is. Raises `OSError` if
        the file cannot be read.
        """

        def request(store: Any) -> Any:
            with path.open("rb") as file:
                part = max(PART_BYTES, path.stat().st_size // MAX_PARTS + 1)
                return store.put(
                    self._path(key), file, chunk_size=part, max_concurrency=PARTS_AT_ONCE
                )

        return _version(self._request(key, request, retry_seconds=self._patience))

    def create(self, key: str, content: bytes) -> Version | None:
        """Write a small object if there is none; None if there is one, or another comes first.

        Of several writers at most one succeeds, as long as their contents differ: a writer whose
        connection was cut after the store had already accepted the object recognises its content.
        """
        return self._write_if(key, content, "create")

    def replace(self, key: str, content: bytes, expected: Version) -> Version | None:
        """Write a small object over one of this version; None if it is another or gone.

        Compare-and-swap, as long as contents differ; see `create` and `Version`.
        """
        fields = {"e_tag": expected.etag, "version": expected.number}
        given = {name: value for name, value in fields.items() if value is not None}
        return self._write_if(key, content, given)

    def _write_if(self, key: str, content: bytes, mode: Any) -> Version | None:
        attempts = 0

        def request(store: Any) -> Version | None:
            from obstore.exceptions import AlreadyExistsError, PreconditionError

            nonlocal attempts
            attempts += 1
            try:
                written = store.put(self._path(key), content, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return self._written(key, content) if attempts > 1 else None
            return _version(written)

        return self._request(key, request)

    def _written(self, key: str, content: bytes) -> Version | None:
        """The version of the object if it holds `content`: an earlier attempt has succeeded."""
        try:
            there, version = self.read(key)
        except ObjectMissingError:
            return None
        return version if there == content else None

    def honours_conditions(self) -> bool:
        """Whether the store refuses to overwrite what `create` and `replace` must not."""
        key = f".conditions-{uuid.uuid4().hex}"
        try:
            first = self.create(key, b"1")
            if first is None or self.create(key, b"2") is not None:
                return False
            is_replaced = self.replace(key, b"3", first) is not None
            return is_replaced and self.replace(key, b"4", first) is None
        finally:
            self.delete([key])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        paths = [self._path(key) for key in keys]
        for start in range(0, len(paths), DELETED_AT_ONCE):
            batch = paths[start : start + DELETED_AT_ONCE]
            try:
                self._delete(batch)
            except ObjectMissingError:
                # Google's and Azure's stores stop at what is not there.
                for path in batch:
                    with contextlib.suppress(ObjectMissingError):
                        self._delete([path])

    def _delete(self, paths: list[str]) -> None:
        self._request("", lambda store: store.delete(paths))


def _changed(address: str) -> ObjectChangedError:
    return ObjectChangedError(f"{address}: changed while it was read; run again")


def _version(described: Any) -> Version:
    # A multipart upload answers "null" from a bucket that keeps no versions.
    number = described["version"]
    etag = described["e_tag"]
    # Azure quotes entity tags in some of its answers only.
    quoted = None if etag is None else '"' + etag.strip('"') + '"'
    return Version(quoted, None if number == "null" else number)


def _folders(paths: Iterable[str]) -> set[str]:
    """The folders of all depths in which there is one of these paths."""
    folders: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders
