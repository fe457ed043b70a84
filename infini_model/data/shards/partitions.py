"""A partition: the documents of one bucket as token shards, made once and cached by content."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model.config import SplitsConfig
from infini_model.data.manifest import (
    FORMAT_VERSION,
    SPLITS,
    Bucket,
    Record,
    Shard,
    Split,
    read_record,
    shard_fault,
    write_record,
)
from infini_model.data.sources.content import digest, hash_documents, sort_order, splits_of
from infini_model.data.sources.spill import Spill, UnusableSpillError
from infini_model.data.sources.string_arrays import MAX_OFFSET, string_buffers
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.tokenizer import Ragged, Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# The most text encoded at once, unless a single document is longer.
ENCODE_BYTES = 16 << 20
# One document in so many, and always the first of a shard, is compared with the reference.
SAMPLE_EVERY = 1000
RECORD = "partition.json"


@dataclass(frozen=True)
class PartitionTask:
    """What a worker needs to make the partition of bucket `bucket` out of `bucket_count`."""

    key: str
    bucket: int
    bucket_count: int
    bytes: int
    digest: str
    partitions_dir: Path
    splits: SplitsConfig
    batch_size: int


class PartitionRecord(Record):
    """A finished partition: one shard per split."""

    shards: dict[Split, Shard]


class _TokenMismatchError(Exception):
    """The fast tokenizer and the reference disagree on a document."""


def partition_key(bucket: Bucket, tokenizer: Tokenizer, splits: SplitsConfig) -> str:
    """Hash of exactly what decides the content of a partition, in hexadecimal."""
    ingredients = [
        FORMAT_VERSION,
        bucket.digest,
        tokenizer.fingerprint,
        tokenizer.eos_token_id,
        splits.model_dump(),
    ]
    return storage.content_key(ingredients)[:32]


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds every id."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def shard_path(partitions_dir: Path, key: str, split: Split) -> Path:
    """The file of one split of a partition."""
    return partitions_dir / key / f"{split}.arrow"


def find_partition(partitions_dir: Path, key: str) -> PartitionRecord | None:
    """The finished partition of this key, its checksums verified, or None."""
    try:
        record = read_record(partitions_dir / key / RECORD, PartitionRecord)
    except DataError:
        return None
    for split, shard in record.shards.items():
        path = shard_path(partitions_dir, key, split)
        fault = shard_fault(path, shard.bytes, shard.sha256)
        if fault:
            log.warning("%s: %s; making its partition again", path, fault)
            return None
    return record


def make_partition(
    task: PartitionTask, spill: Spill, tokenizer: Tokenizer, advance: Advance
) -> PartitionRecord:
    """Tokenise the documents of a bucket into `<partitions_dir>/<key>/`.

    Another process that asks for the same key waits and uses the result. `advance` receives the
    bytes of text as they are tokenised.

    Raises `UnusableSpillError` if the documents differ from those that were scanned, `UserError`
    on a full disk.
    """
    with storage.lock(task.partitions_dir / ".locks" / task.key):
        found = find_partition(task.partitions_dir, task.key)
        if found is not None:
            advance(task.bytes)
            return found
        storage.remove_leftovers(task.partitions_dir, task.key)
        bucket = _read_bucket(task, spill)
        with storage.atomic_folder(task.partitions_dir / task.key) as folder:
            try:
                record = _write_shards(task, tokenizer, bucket, folder, advance)
            except _TokenMismatchError:
                log.warning(
                    "%s: the fast tokenizer and tokenizers disagree on a document; using "
                    "tokenizers for partition %s",
                    tokenizer.spec,
                    task.key,
                )
                reference = tokenizer.reference()
                record = _write_shards(task, reference, bucket, folder, advance)
            write_record(folder / RECORD, record)
    return record


@dataclass(frozen=True)
class _Bucket:
    """The documents of a bucket in the order they were read, and the sorted rows of each split."""

    texts: pa.ChunkedArray
    rows: dict[Split, np.ndarray]


def _read_bucket(task: PartitionTask, spill: Spill) -> _Bucket:
    """Read a bucket and verify its content. Raises `UnusableSpillError`."""
    texts = spill.texts(task.bucket, task.bucket_count)
    none = np.empty((0, 2), np.uint64)
    hashes = np.concatenate([none, *map(hash_documents, texts.chunks)])
    order = sort_order(hashes)
    if digest(hashes[order]) != task.digest:
        raise UnusableSpillError("its text is not what was scanned")
    split_of = splits_of(hashes[order], task.splits)
    rows = {split: order[split_of == number] for number, split in enumerate(SPLITS)}
    return _Bucket(texts, rows)


def _write_shards(
    task: PartitionTask, tokenizer: Tokenizer, bucket: _Bucket, folder: Path, advance: Advance
) -> PartitionRecord:
    encoded = _encode(tokenizer, bucket.texts, task.batch_size, advance)
    shards: dict[Split, Shard] = {}
    for split, rows in bucket.rows.items():
        closed = encoded.take(rows)
        _verify_sample(tokenizer, bucket.texts, rows, closed)
        path = folder / f"{split}.arrow"
        write_shard(path, closed)
        shards[split] = Shard(
            file=path.name,
            partition=task.key,
            documents=len(rows),
            tokens=len(closed.ids),
            bytes=path.stat().st_size,
            sha256=storage.sha256(path),
        )
    return PartitionRecord(shards=shards)


@dataclass(frozen=True)
class _Encoded:
    """Token ids of documents in the order they were read, then the end-of-text token as one more.

    `ids` uint8, uint16 or int32 [N + 1], `offsets` int64 [documents + 2].
    """

    ids: np.ndarray
    offsets: np.ndarray

    def take(self, rows: np.ndarray) -> Ragged:
        """The documents `rows` in this order, the end-of-text token after each.

        Taken as binary rows, since Arrow copies these whole but lists number by number.
        """
        end_of_text = len(self.offsets) - 2
        chosen = np.full(2 * len(rows), end_of_text)
        chosen[::2] = rows
        width = self.ids.itemsize
        buffers = [None, pa.py_buffer(self.offsets * width), pa.py_buffer(self.ids)]
        documents = pa.LargeBinaryArray.from_buffers(pa.large_binary(), end_of_text + 1, buffers)
        taken = documents.take(pa.array(chosen))
        if not len(taken):
            return Ragged(self.ids[:0], np.zeros(1, np.int64))
        _, ends, data = taken.buffers()
        offsets = np.frombuffer(ends, np.int64)[: len(taken) + 1 : 2] // width
        return Ragged(np.frombuffer(data, self.ids.dtype)[: offsets[-1]], offsets)


def _encode(
    tokenizer: Tokenizer, texts: pa.ChunkedArray, batch_size: int, advance: Advance
) -> _Encoded:
    """The ids of all documents, encoded a batch at a time."""
    dtype = id_dtype(tokenizer.vocab_size)
    parts, sizes = [], []
    for batch in _batches(texts, batch_size):
        ragged = tokenizer.encode_batch(batch)
        parts.append(ragged.ids)
        sizes.append(np.diff(ragged.offsets))
        advance(batch.nbytes)
    end_of_text = np.array([tokenizer.eos_token_id], dtype)
    ids = np.concatenate([*parts, end_of_text], dtype=dtype, casting="unsafe")
    offsets = np.zeros(len(texts) + 2, np.int64)
    np.cumsum(np.concatenate([*sizes, [1]]), out=offsets[1:])
    return _Encoded(ids, offsets)


def _batches(
    texts: pa.ChunkedArray, batch_size: int, batch_bytes: int = ENCODE_BYTES
) -> Iterator[pa.StringArray]:
    """All documents in order, in arrays of at most `batch_size` documents and `batch_bytes`."""
    for chunk in texts.chunks:
        offsets, _ = string_buffers(chunk)
        start = 0
        while start < len(chunk):
            limit = min(int(offsets[start]) + batch_bytes, MAX_OFFSET)
            end = int(np.searchsorted(offsets, np.int32(limit), "right")) - 1
            end = min(max(end, start + 1), start + batch_size)
            yield chunk.slice(start, end - start)
            start = end


def _verify_sample(
    tokenizer: Tokenizer, texts: pa.ChunkedArray, rows: np.ndarray, documents: Ragged
) -> None:
    """Compare a sample of the documents with the reference. Raises `_TokenMismatchError`."""
    for index in range(0, len(rows), SAMPLE_EVERY):
        ids = documents.ids[documents.offsets[index] : documents.offsets[index + 1] - 1]
        text = memoryview(texts[int(rows[index])].as_buffer())
        if not tokenizer.same_ids(text, ids):
            raise _TokenMismatchError


def write_shard(path: Path, documents: Ragged) -> None:
    """Write documents with their end-of-text tokens as an Arrow stream of one record batch.

    Raises `DataError` if there are more tokens than 31-bit offsets can address.
    """
    ids, offsets = documents
    if len(ids) > MAX_OFFSET:
        raise DataError(
            f"data.partition_megabytes: a partition has {len(ids)} tokens, but a shard "
            f"holds at most {MAX_OFFSET}; choose a smaller value"
        )
    rows = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
    schema = pa.schema(
        [pa.field("input_ids", rows.type)],
        {"huggingface": json.dumps({"info": {"features": features(ids.dtype)}})},
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays([rows], schema=schema))


def features(dtype: np.dtype) -> dict[str, object]:
    """The columns of a shard as the `datasets` library describes them."""
    value = {"dtype": dtype.name, "_type": "Value"}
    return {"input_ids": {"feature": value, "_type": "List"}}
