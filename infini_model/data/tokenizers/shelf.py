"""Where the tokenizers of datasets are kept: in a folder, and in the object store if there is one.

A tokenizer is kept under its key for whoever makes partitions. The name of a dataset is pinned to
the tokenizer that was trained for it. With a store, the pin in the store counts, so that another
machine goes on with the same tokenizer, and the folder is a copy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from infini_model.data.manifest import TokenizerRecord
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE
from infini_model.data.tokenizers.load import load_saved
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, ObjectMissingError
from infini_model.runtime.object_store import ObjectStore, Version
from infini_model.runtime.records import Record, parse_record, write_record

FOLDER = ".tokenizers"


class PinnedTokenizer(Record):
    """Which trained tokenizer the datasets of a name use: `key` is its folder."""

    key: str
    fingerprint: str
    vocab_size: int
    trained: str


class Pin(NamedTuple):
    """A pin as it was read: its content, where it is, and its version in a store."""

    content: bytes
    place: str
    version: Version | None = None

    def parse(self) -> PinnedTokenizer:
        """What it says. Raises `DataError` if it is damaged."""
        return parse_record(self.content, self.place, PinnedTokenizer)


class TokenizerStore:
    """The tokenizers of a datasets folder, and of the address `store` that it is a copy of.

    With a store, every method raises `StoreError` and `UnreachableError`.
    """

    def __init__(self, datasets_dir: Path, store: str | None = None) -> None:
        self.folder = datasets_dir / FOLDER
        self._store = None if store is None else ObjectStore(f"{store}/{FOLDER}")

    def lock(self, name: str) -> AbstractContextManager[bool]:
        """Held on this machine while the tokenizer of a dataset's name is decided."""
        return storage.lock(self.folder / ".locks" / name)

    def has(self, key: str) -> bool:
        """Whether the tokenizer of this key is kept."""
        if self._store is not None:
            return self._store.find(f"{key}/{TOKENIZER_FILE}") is not None
        return self._file(key).is_file()

    def place_of(self, key: str) -> str:
        """Where the tokenizer of this key is kept, for messages."""
        name = f"{key}/{TOKENIZER_FILE}"
        return str(self._file(key)) if self._store is None else self._store.address_of(name)

    def keep(self, tokenizer: Tokenizer, key: str) -> None:
        """Keep a tokenizer under a key, for whoever makes partitions. Raises `UserError`."""
        if tokenizer.spec == "bytes":
            return
        if not self._file(key).is_file():
            with self.lock(key):
                storage.remove_leftovers(self.folder, key)
                with storage.atomic_folder(self.folder / key) as temporary:
                    tokenizer.save(temporary)
        if self._store is not None and not self.has(key):
            self._store.write(f"{key}/{TOKENIZER_FILE}", self._file(key).read_bytes())

    def load(self, key: str, spec: str) -> Tokenizer:
        """The tokenizer of a key, on the CPU. Raises `DataError` if it is missing or damaged."""
        if self._store is not None and spec != "bytes" and not self._file(key).is_file():
            self._store.download(f"{key}/{TOKENIZER_FILE}", self._file(key))
        return load_saved(self.folder / key, spec)

    def planned(self, key: str, record: TokenizerRecord) -> Tokenizer:
        """The tokenizer that a partition was planned with. Raises `DataError` if it is damaged."""
        tokenizer = self.load(key, record.spec)
        if tokenizer.fingerprint != record.fingerprint:
            raise DataError(
                f"{self.place_of(key)}: is not the tokenizer that the partition was planned with"
            )
        return tokenizer

    def discard(self, key: str) -> None:
        """Remove a tokenizer that is damaged, so that it is made again."""
        self._file(key).unlink(missing_ok=True)
        if self._store is not None:
            self._store.delete([f"{key}/{TOKENIZER_FILE}"])

    def read_pin(self, name: str) -> Pin | None:
        """The pin of a dataset's name, None if there is none."""
        if self._store is not None:
            try:
                content, version = self._store.read(f"{name}.json")
            except ObjectMissingError:
                return None
            return Pin(content, self._store.address_of(f"{name}.json"), version)
        path = self.folder / f"{name}.json"
        return Pin(path.read_bytes(), str(path)) if path.exists() else None

    def pin(self, name: str, pinned: PinnedTokenizer, seen: Pin | None) -> PinnedTokenizer:
        """Pin a dataset's name to a tokenizer in place of the pin that was `seen`.

        Of several machines the first decides: returns the pin that counts. Raises `UserError`.
        Call it while holding the `lock` of the name.
        """
        if self._store is None:
            storage.remove_leftovers(self.folder, f"{name}.json")
            write_record(self.folder / f"{name}.json", pinned)
            return pinned
        key, content = f"{name}.json", pinned.model_dump_json(indent=2).encode()
        if seen is None or seen.version is None:
            written = self._store.create(key, content)
        else:
            written = self._store.replace(key, content, seen.version)
        if written is None:
            first = self.read_pin(name)
            if first is not None and first.parse().vocab_size == pinned.vocab_size:
                return first.parse()
            # The other machine wants another size, which this one does not share.
            self._store.write(key, content)
        return pinned

    def _file(self, key: str) -> Path:
        return self.folder / key / TOKENIZER_FILE
