"""A partition: a part of the source as token shards, made in one pass and kept by content.

`make_partition` is a pure function of a small spec, which any process on any machine can run: it
reads the files' ranges, tokenises the documents batch by batch and writes the shards of the three
splits. Its memory does not grow with the partition, and making one twice does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from infini_model.config import SplitsConfig
from infini_model.data.manifest import FORMAT_VERSION, SPLITS, Shard, Split, TokenizerRecord
from infini_model.data.shards.layout import Partition
from infini_model.data.shards.writing import ShardWriter, as_rows
from infini_model.data.sources.content import hash_documents, splits_of
from infini_model.data.sources.documents import read_documents
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import Reading, content_of
from infini_model.data.sources.pairs.arrays import TEXTS, join
from infini_model.data.sources.string_arrays import MAX_OFFSET, string_buffers
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.tokenizer import Ragged, Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.records import Record

log = logging.getLogger(__name__)

# The most text encoded at once, unless a single document is longer.
ENCODE_BYTES = 8 << 20
# One text in so many, and always the first, is compared with the reference.
SAMPLE_EVERY = 1000


class PartitionSpec(Record):
    """What decides a partition, and its `key`.

    Some fields change nothing in the result: `tokenizer_folder`, where the tokenizer is kept among
    those of all datasets; `batch_size`, the most documents to encode at once; `bytes`, an estimate
    of the text.
    """

    key: str
    ranges: tuple[FileRange, ...]
    reading: Reading
    tokenizer: TokenizerRecord
    tokenizer_folder: str
    splits: SplitsConfig
    batch_size: int
    bytes: int


class PartitionRecord(Record):
    """A finished partition: its documents, the bytes of their text, and the shards of each split.

    `skipped` counts the documents that were left out.
    """

    documents: int
    bytes: int
    skipped: int
    shards: dict[Split, list[Shard]]


class _TokenMismatchError(Exception):
    """The fast tokenizer and the reference disagree on a document."""


class Recipe(NamedTuple):
    """What all partitions of a dataset have in common; the fields are those of `PartitionSpec`."""

    reading: Reading
    tokenizer: TokenizerRecord
    tokenizer_folder: str
    splits: SplitsConfig
    batch_size: int

    def keyed(self, partitions: Sequence[Partition]) -> list[tuple[str, Partition]]:
        """The partitions with their keys, in the order of these.

        A key is a hash of exactly what decides the content: not of paths, nor of the files' order.
        """
        common = [FORMAT_VERSION, self.tokenizer.fingerprint, self.tokenizer.eos_token_id]
        common += [self.splits.model_dump(), self.reading.decides]
        if self.tokenizer.bos_token_id is not None:
            common += [self.tokenizer.bos_token_id]
        prefix = storage.content_key(common)
        keyed = [
            (
                storage.content_key([prefix, sorted(map(content_of, partition.ranges))])[:32],
                partition,
            )
            for partition in partitions
        ]
        return sorted(keyed, key=itemgetter(0))

    def spec(self, key: str, partition: Partition) -> PartitionSpec:
        """The spec of a partition."""
        return PartitionSpec(
            key=key, ranges=partition.ranges, bytes=partition.bytes, **self._asdict()
        )


def make_partition(
    spec: PartitionSpec, tokenizer: Tokenizer, folder: Path, advance: Advance
) -> PartitionRecord:
    """Read, tokenise and write the documents of a partition to shards in the empty `folder`.

    `advance` receives the bytes of text as they are tokenised.

    Raises `DataError` that names a file or document that cannot be read, or a file that changed;
    `OSError` on a full disk.
    """
    try:
        return _write(spec, tokenizer, folder, advance)
    except _TokenMismatchError:
        log.warning(
            "%s: the fast tokenizer and tokenizers disagree on a document; using tokenizers for "
            "partition %s",
            tokenizer.spec,
            spec.key,
        )
    for path in folder.iterdir():
        path.unlink()
    return _write(spec, tokenizer.reference(), folder, lambda _: None)


def _write(
    spec: PartitionSpec, tokenizer: Tokenizer, folder: Path, advance: Advance
) -> PartitionRecord:
    dtype = np.dtype(spec.tokenizer.dtype)
    writers = {split: ShardWriter(folder, spec.key, split, dtype) for split in SPLITS}
    each = 1 if spec.reading.template is None else TEXTS
    encoded = size = skipped = 0
    for batch in read_documents(spec.ranges, spec.reading, ENCODE_BYTES):
        skipped += batch.skipped
        for texts in slices(batch.texts, spec.batch_size, each):
            ragged = tokenizer.encode_batch(texts)
            _verify_sample(tokenizer, texts, ragged, encoded)
            _add(texts, ragged, spec, writers, each)
            text_bytes = int(np.ptp(string_buffers(texts)[0][[0, -1]]))
            encoded += len(texts)
            size += text_bytes
            advance(text_bytes)
    shards = {split: writer.close() for split, writer in writers.items()}
    return PartitionRecord(documents=encoded // each, bytes=size, skipped=skipped, shards=shards)


def slices(texts: pa.StringArray, batch_size: int, each: int = 1) -> Iterator[pa.StringArray]:
    """All documents in order, in arrays of at most `batch_size` documents and `ENCODE_BYTES`.

    A document has `each` texts; a single one may be longer.
    """
    offsets, _ = string_buffers(texts)
    start = 0
    while start < len(texts):
        limit = min(int(offsets[start]) + ENCODE_BYTES, MAX_OFFSET)
        end = int(np.searchsorted(offsets, np.int32(limit), "right")) - 1
        count = max((end - start) // each, 1)
        end = start + each * min(count, batch_size)
        yield texts.slice(start, end - start)
        start = end


def _verify_sample(
    tokenizer: Tokenizer, texts: pa.StringArray, ragged: Ragged, before: int
) -> None:
    """Compare a sample with the reference; `before` texts of the partition precede these.

    Raises `_TokenMismatchError`.
    """
    for row in range(-before % SAMPLE_EVERY, len(texts), SAMPLE_EVERY):
        ids = ragged.ids[ragged.offsets[row] : ragged.offsets[row + 1]]
        if not tokenizer.same_ids(memoryview(texts[row].as_buffer()), ids):
            raise _TokenMismatchError


def _add(
    texts: pa.StringArray,
    ragged: Ragged,
    spec: PartitionSpec,
    writers: dict[Split, ShardWriter],
    each: int,
) -> None:
    """Append each document, of `each` texts, to the shards of its split."""
    split_of = splits_of(hash_documents(texts if each == 1 else join(texts)), spec.splits)
    record = spec.tokenizer
    dtype = np.dtype(record.dtype)
    documents = as_rows(ragged, dtype, record.eos_token_id, record.bos_token_id, each=each)
    for number, writer in enumerate(writers.values()):
        rows = np.flatnonzero(split_of == number)
        if len(rows):
            writer.add(documents, rows)
