"""The tokenizer of a dataset: loaded by name, or trained on its text.

A trained tokenizer is kept on the datasets' shelf, and the dataset's name is pinned to it: a source
that grows keeps its tokenizer, since another one would change every token of it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa

from infini_model.config import DataConfig
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import Reading, content_of, read_documents
from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, train_tokenizer
from infini_model.data.tokenizers.load import check_device, load_tokenizer
from infini_model.data.tokenizers.shelf import Pin, PinnedTokenizer, TokenizerStore
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, StoreError

log = logging.getLogger(__name__)

# More text hardly changes the merges, and the trainer keeps all words in memory.
SAMPLE_BYTES = 128 << 20
# A large source is sampled at this many places.
SAMPLE_PLACES = 64


class DatasetTokenizer(NamedTuple):
    """A tokenizer on the CPU, and its key on the shelf.

    `pin` is that of the dataset's name if the tokenizer was trained for an earlier dataset.
    """

    tokenizer: Tokenizer
    key: str
    pin: PinnedTokenizer | None = None


def dataset_tokenizer(
    partitions: Sequence[Sequence[FileRange]],
    reading: Reading,
    config: DataConfig,
    shelf: TokenizerStore,
) -> DatasetTokenizer:
    """The tokenizer that `config` asks for.

    Any process that makes a partition loads it from the shelf, and puts it on its device.
    `train` trains it once for datasets of this name and vocabulary size; `tokenizer.retrain` trains
    it on the files that there are now. Raises `DataError` as `load_tokenizer` and `train_tokenizer`
    do, `DeviceError` for a GPU that does not exist.
    """
    if config.engine == "local":
        check_device(config.device)
    if config.tokenizer.spec != "train":
        tokenizer = load_tokenizer(config.tokenizer.spec)
        key = tokenizer.fingerprint[:32]
        shelf.keep(tokenizer, key)
        return DatasetTokenizer(tokenizer, key)
    with shelf.lock(config.name):
        seen = shelf.read_pin(config.name)
        reused = None if seen is None else _reuse(seen, config, shelf)
        if reused is not None:
            return reused
        size = config.tokenizer.vocab_size
        tokenizer, key = _train(partitions, reading, size, shelf)
        pinned = PinnedTokenizer(
            key=key,
            fingerprint=tokenizer.fingerprint,
            vocab_size=size,
            trained=datetime.now(UTC).date().isoformat(),
        )
        counts = shelf.pin(config.name, pinned, seen)
    if counts.key != key:
        tokenizer = shelf.load(counts.key, "train")
    return DatasetTokenizer(tokenizer, counts.key)


def _reuse(pin: Pin, config: DataConfig, shelf: TokenizerStore) -> DatasetTokenizer | None:
    """The tokenizer that a pin names, if it is what is asked for and is intact."""
    asked = config.tokenizer
    if asked.retrain:
        return None
    try:
        pinned = pin.parse()
    except DataError as error:
        log.warning("%s; training the tokenizer again", error)
        return None
    if pinned.vocab_size != asked.vocab_size:
        return None
    if not shelf.has(pinned.key):
        log.warning("%s: is missing; training it again", shelf.place_of(pinned.key))
        return None
    tokenizer = _load_intact(pinned.key, shelf, pinned.fingerprint)
    return None if tokenizer is None else DatasetTokenizer(tokenizer, pinned.key, pinned)


def _load_intact(
    key: str, shelf: TokenizerStore, fingerprint: str | None = None
) -> Tokenizer | None:
    """A tokenizer from the shelf; removed and None if damaged or of another fingerprint."""
    fault = "is not the tokenizer that was trained"
    try:
        tokenizer = shelf.load(key, "train")
        if fingerprint in (None, tokenizer.fingerprint):
            return tokenizer
    except StoreError:
        raise
    except DataError as error:
        fault = str(error)
    log.warning("%s: %s; training it again", shelf.place_of(key), fault)
    shelf.discard(key)
    return None


def _train(
    partitions: Sequence[Sequence[FileRange]],
    reading: Reading,
    vocab_size: int,
    shelf: TokenizerStore,
) -> tuple[Tokenizer, str]:
    """Train a tokenizer, unless one was trained on the same text; returns its key as well."""
    # Neither the names nor the order of the files decide what is learnt.
    places = sorted(partitions, key=_content)
    contents = [_content(place) for place in places]
    decides = [contents, reading.decides, vocab_size, LLAMA3_PATTERN, SAMPLE_BYTES]
    key = storage.content_key(decides)[:32]
    kept = _load_intact(key, shelf) if shelf.has(key) else None
    if kept is not None:
        return kept, key
    log.info("tokenizer: training one of %d tokens on the source", vocab_size)
    sample = (texts for texts in _sample(places, reading) if len(texts))
    first = next(sample, None)
    if first is None:
        address = partitions[0][0].file.address if partitions else "data.source"
        raise DataError(f"{address}: no documents left to train a tokenizer on")
    trained = train_tokenizer(itertools.chain([first], sample), vocab_size)
    if trained.vocab_size < vocab_size:
        log.warning(
            "the corpus yields only %d tokens, fewer than data.tokenizer.vocab_size=%d",
            trained.vocab_size,
            vocab_size,
        )
    shelf.keep(trained, key)
    return trained, key


def _content(place: Sequence[FileRange]) -> str:
    return storage.content_key(sorted(map(content_of, place)))


def _sample(places: Sequence[Sequence[FileRange]], reading: Reading) -> Iterator[pa.StringArray]:
    """The documents, or about `SAMPLE_BYTES` of them: the first of `SAMPLE_PLACES` partitions."""
    chosen = places[:: max(1, len(places) // SAMPLE_PLACES)]
    share = SAMPLE_BYTES // len(chosen)
    for place in chosen:
        left = share
        for batch in read_documents(place, reading):
            yield batch.texts
            left -= batch.texts.nbytes
            if left <= 0:
                break
