"""The tokenizer of a dataset: loaded by name, or trained on its text.

Tokenizers are kept by content for whoever makes partitions, in a folder and in the object store if
there is one. One that was trained is pinned to the dataset's name and the size of its vocabulary: a
source that grows keeps its tokenizer, since another one would change every token of it. With
a store, the pin in the store counts, so that another machine goes on with the same tokenizer, and
the folder is a copy.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from infini_model.config import DataConfig
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import content_of, read_documents
from infini_model.data.sources.rows import Reading
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.load import check_device, load_saved, load_tokenizer
from infini_model.data.tokenizers.stated import TOKENIZER_FILE
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, ObjectMissingError
from infini_model.runtime.object_store import ObjectStore, Version
from infini_model.runtime.records import Record, parse_record, write_record
from infini_model.runtime.storage import content_key

log = logging.getLogger(__name__)

FOLDER = ".tokenizers"
# More text hardly changes the merges, and the trainer keeps all words in memory.
SAMPLE_BYTES = 128 << 20
# A large source is sampled at this many places.
SAMPLE_PLACES = 64
# The files of a partition, and how they are read.
Place: TypeAlias = tuple[Reading, Sequence[FileRange]]


class PinnedTokenizer(Record):
    """The tokenizer that the datasets of a name use, and the day on which it was trained."""

    fingerprint: str
    trained: str


class TokenizerStore:
    """The tokenizers of a datasets folder, and of the address `store` that it is a copy of.

    With a store, every method raises `StoreError` and `UnreachableError`.
    """

    def __init__(self, datasets_dir: Path, store: str | None = None) -> None:
        self.folder = datasets_dir / FOLDER
        self._store = None if store is None else ObjectStore(f"{store}/{FOLDER}")

    def lock(self, name: str) -> AbstractContextManager[bool]:
        """Held on this machine while the tokenizer of a name is decided."""
        return storage.lock(self.folder / ".locks" / name)

    def keep(self, tokenizer: Tokenizer) -> None:
        """Keep a tokenizer, in place of a copy that is damaged. Raises `UserError`."""
        if not isinstance(tokenizer, BPETokenizer):
            return  # that of bytes is known by its name
        path = self.folder_of(tokenizer.fingerprint) / TOKENIZER_FILE
        content = tokenizer.text.encode()
        with self.lock(path.parent.name):
            is_new = not path.is_file() or path.read_bytes() != content
            if is_new:
                storage.remove_leftovers(path.parent, path.name)
                with storage.atomic_file(path) as temporary:
                    temporary.write_bytes(content)
        if self._store is not None:
            key = f"{path.parent.name}/{TOKENIZER_FILE}"
            if is_new or self._store.find(key) is None:
                self._store.write(key, content)

    def load(self, fingerprint: str, spec: str, eos_token_id: int | None = None) -> Tokenizer:
        """The tokenizer of a fingerprint, loaded by the name `spec` at first, on the CPU.

        `eos_token_id` ends its documents; None for one that was trained.

        With a store, a copy that is missing here or damaged is downloaded again. Raises `DataError`
        if the tokenizer is missing or damaged.
        """
        try:
            return self._load_here(fingerprint, spec, eos_token_id)
        except DataError:
            if self._store is None or spec == "bytes":
                raise
        path = self.folder_of(fingerprint) / TOKENIZER_FILE
        self._store.download(f"{path.parent.name}/{TOKENIZER_FILE}", path)
        return self._load_here(fingerprint, spec, eos_token_id)

    def _load_here(self, fingerprint: str, spec: str, eos_token_id: int | None) -> Tokenizer:
        folder = self.folder_of(fingerprint)
        tokenizer = load_saved(folder, spec, eos_token_id)
        if tokenizer.fingerprint != fingerprint:
            raise DataError(f"{folder / TOKENIZER_FILE}: is not the tokenizer that was kept there")
        return tokenizer

    def read_pin(self, name: str) -> tuple[PinnedTokenizer | None, Version | None]:
        """The pin of a name, None if there is none that is intact, and its version in a store."""
        path, version = self.folder / f"{name}.json", None
        place = str(path)
        try:
            if self._store is not None:
                content, version = self._store.read(path.name)
                place = self._store.address_of(path.name)
            else:
                content = path.read_bytes()
            return parse_record(content, place, PinnedTokenizer), version
        except (FileNotFoundError, ObjectMissingError):
            return None, None
        except DataError as error:
            log.warning("%s; training the tokenizer again", error)
            return None, version

    def pin(self, name: str, pinned: PinnedTokenizer, version: Version | None) -> PinnedTokenizer:
        """Pin a tokenizer to a name in place of the `version` that was read; None for none.

        Of several machines the first decides: returns the pin that counts. Raises `UserError`.
        Call it while holding the `lock` of the name.
        """
        if self._store is None:
            storage.remove_leftovers(self.folder, f"{name}.json")
            write_record(self.folder / f"{name}.json", pinned)
            return pinned
        key, content = f"{name}.json", pinned.model_dump_json(indent=2).encode()
        written = self._store.write_if(key, content, version)
        first = None if written else self.read_pin(name)[0]
        return first or pinned

    def folder_of(self, fingerprint: str) -> Path:
        """The folder of a tokenizer among those that are kept."""
        return self.folder / fingerprint[:32]


def dataset_tokenizer(
    partitions: Sequence[Place], config: DataConfig, kept: TokenizerStore
) -> tuple[Tokenizer, PinnedTokenizer | None]:
    """The tokenizer that `config` asks for, and its pin if it was trained for an earlier dataset.

    Any process that makes a partition loads it from those that are `kept`, and puts it on its
    device. `train` trains it once for datasets of this name and vocabulary size. Raises `DataError`
    as `load_tokenizer` does, `DeviceError` for a GPU that does not exist.
    """
    asked = config.tokenizer
    if config.engine == "local":
        check_device(config.device)
    if asked.spec != "train":
        tokenizer = load_tokenizer(asked.spec, eos_token=asked.eos_token)
        if isinstance(tokenizer, BPETokenizer):
            log.info("tokenizer %s: documents end with %s", asked.spec, tokenizer.described_ends())
        kept.keep(tokenizer)
        return tokenizer, None
    name = f"{config.name}.{asked.vocab_size}"
    with kept.lock(name):
        pin, version = kept.read_pin(name)
        if pin is not None:
            try:
                return kept.load(pin.fingerprint, "train"), pin
            except (DataError, ObjectMissingError) as error:
                place = kept.folder_of(pin.fingerprint)
                log.warning("%s: %s; training the tokenizer again", place, error)
        trained = _train(partitions, asked.vocab_size)
        kept.keep(trained)
        today = datetime.now(UTC).date().isoformat()
        new = PinnedTokenizer(fingerprint=trained.fingerprint, trained=today)
        counts = kept.pin(name, new, version)
    is_first = counts.fingerprint == trained.fingerprint
    return trained if is_first else kept.load(counts.fingerprint, "train"), None


def _train(partitions: Sequence[Place], vocab_size: int) -> Tokenizer:
    log.info("tokenizer: training one of %d tokens on the source", vocab_size)
    # Neither the names nor the order of the files decide what is learnt.
    places = sorted(partitions, key=lambda each: content_key(sorted(map(content_of, each[1]))))
    sample = (texts for texts in _sample(places) if len(texts))
    first = next(sample, None)
    if first is None:
        address = partitions[0][1][0].file.address if partitions else "data.source"
        raise DataError(f"{address}: no documents left to train a tokenizer on")
    return train_tokenizer(itertools.chain([first], sample), vocab_size)


def _sample(places: Sequence[Place]) -> Iterator[pa.StringArray]:
    """The documents, or about `SAMPLE_BYTES` of them: the first of `SAMPLE_PLACES` partitions.

    Of a document that is longer than the share of its partition, only the beginning.
    """
    chosen = places[:: max(1, len(places) // SAMPLE_PLACES)]
    share = SAMPLE_BYTES // len(chosen)
    for reading, ranges in chosen:
        left = share
        beginnings = (each.model_copy(update={"whole": False}) for each in ranges)
        for batch in read_documents(beginnings, reading):
            yield pc.utf8_slice_codeunits(batch.texts, 0, share)
            left -= batch.texts.nbytes
            if left <= 0:
                break
