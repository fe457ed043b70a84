"""One partition: the documents of one bucket as token shards, made once and kept by content.

`python -m infini_model.data.partitions PARENT DEVICE` is the worker: it takes tasks as JSON lines
on its standard input and answers with JSON lines, and dies with its parent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model import errors, storage
from infini_model.config import SplitsConfig
from infini_model.data.corpus import digest, splits_of
from infini_model.data.documents import BATCH_BYTES, LARGEST_DOCUMENT
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
from infini_model.data.spill import Spilled, read_spill
from infini_model.data.tokenizers import Ragged, Tokenizer, load_saved
from infini_model.errors import DataError, UserError
from infini_model.processes import die_with_parent

logger = logging.getLogger(__name__)

# Of so many documents of a shard one is encoded by the reference implementation as well, the
# first always; of a long document only the beginning, since the reference takes its time.
SAMPLE_EVERY = 1000
SAMPLE_CHARACTERS = 1 << 18
RECORD = "partition.json"


class PartitionTask(Record):
    """What a worker needs to know to make one partition."""

    key: str
    digest: str
    spill: Path
    partitions_dir: Path
    tokenizer_dir: Path
    tokenizer_spec: str
    splits: SplitsConfig
    batch_size: int


class PartitionRecord(Record):
    """A finished partition: one shard a split."""

    shards: dict[Split, Shard]


class _OtherIdsError(Exception):
    """The fast tokenizer and the reference disagree on a document."""


def partition_key(bucket: Bucket, tokenizer: Tokenizer, splits: SplitsConfig) -> str:
    """Hash of what decides the content of a partition, and of nothing else."""
    ingredients = [
        FORMAT_VERSION,
        bucket.digest,
        tokenizer.fingerprint,
        tokenizer.eos_token_id,
        splits.model_dump(),
    ]
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:32]


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds every id."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def shard_path(partitions_dir: Path, key: str, split: Split) -> Path:
    """The file of one split of a partition."""
    return partitions_dir / key / f"{split}.arrow"


def find_partition(partitions_dir: Path, key: str) -> PartitionRecord | None:
    """The finished partition of this key, its shards checked byte for byte, or None."""
    try:
        record = read_record(partitions_dir / key / RECORD, PartitionRecord)
    except DataError:
        return None
    for split, shard in record.shards.items():
        path = shard_path(partitions_dir, key, split)
        fault = shard_fault(path, shard.bytes, shard.sha256)
        if fault:
            logger.warning("%s: %s; it is made again", path, fault)
            return None
    return record


def make_partition(
    task: PartitionTask, tokenizer: Tokenizer, on_bytes: Callable[[int], None]
) -> PartitionRecord:
    """Tokenise the documents of one spill file into `<partitions_dir>/<key>/`.

    Whoever asks for the same key meanwhile waits and takes what was made. `on_bytes` is told the
    bytes of text as they are tokenised.

    Raises `DataError` if the documents are not those that were scanned, `UserError` on a full disk.
    """
    with storage.lock(task.partitions_dir / ".locks" / task.key):
        found = find_partition(task.partitions_dir, task.key)
        if found is not None:
            return found
        storage.remove_leftovers(task.partitions_dir, task.key)
        spilled = read_spill(task.spill)
        order = np.lexsort((spilled.hashes[:, 1], spilled.hashes[:, 0]))
        if digest(spilled.hashes[order]) != task.digest:
            raise DataError("data.source: a file changed while it was read; run again")
        with storage.atomic_folder(task.partitions_dir / task.key) as folder:
            try:
                record = _write_shards(task, tokenizer, spilled, order, folder, on_bytes)
            except _OtherIdsError:
                logger.warning(
                    "%s: the fast way and tokenizers disagree on a document; tokenizers makes "
                    "partition %s",
                    tokenizer.spec,
                    task.key,
                )
                slow = tokenizer.reference()
                record = _write_shards(task, slow, spilled, order, folder, on_bytes)
            write_record(folder / RECORD, record)
    return record


def _write_shards(
    task: PartitionTask,
    tokenizer: Tokenizer,
    spilled: Spilled,
    order: np.ndarray,
    folder: Path,
    on_bytes: Callable[[int], None],
) -> PartitionRecord:
    split_of = splits_of(spilled.hashes, task.splits)[order]
    shards: dict[Split, Shard] = {}
    for number, split in enumerate(SPLITS):
        parts = [
            _close_documents(ragged, tokenizer)
            for ragged in _encode(
                tokenizer, spilled.texts, order[split_of == number], task.batch_size, on_bytes
            )
        ]
        path = folder / f"{split}.arrow"
        documents, tokens = write_shard(path, parts, id_dtype(tokenizer.vocab_size))
        shards[split] = Shard(
            file=path.name,
            partition=task.key,
            documents=documents,
            tokens=tokens,
            bytes=path.stat().st_size,
            sha256=storage.sha256(path),
        )
    return PartitionRecord(shards=shards)


def _encode(
    tokenizer: Tokenizer,
    texts: pa.LargeStringArray,
    order: np.ndarray,
    batch_size: int,
    on_bytes: Callable[[int], None],
) -> Iterator[Ragged]:
    """Encode documents in this order, a batch at a time, and check a sample of them."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :]
    ends = np.cumsum(offsets[order + 1] - offsets[order])
    start = 0
    while start < len(order):
        before = ends[start - 1] if start else 0
        fits = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
        end = min(start + batch_size, max(fits, start + 1))
        batch = texts.take(pa.array(order[start:end])).cast(pa.string())
        ragged = tokenizer.encode_batch(batch)
        for index in range(-start % SAMPLE_EVERY, end - start, SAMPLE_EVERY):
            ids = ragged.ids[ragged.offsets[index] : ragged.offsets[index + 1]]
            _check(tokenizer, batch[index].as_py(), ids)
        yield ragged
        on_bytes(int(ends[end - 1] - before))
        start = end


def _check(tokenizer: Tokenizer, text: str, ids: np.ndarray) -> None:
    if len(text) > SAMPLE_CHARACTERS:
        text = text[:SAMPLE_CHARACTERS]
        ids = tokenizer.encode_batch([text]).ids
    if not tokenizer.same_ids(text, ids):
        raise _OtherIdsError


def _close_documents(ragged: Ragged, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Put the end-of-text token after every document: its ids, and the documents' lengths."""
    count = len(ragged.offsets) - 1
    closing = ragged.offsets[1:] + np.arange(count)
    values = np.empty(len(ragged.ids) + count, id_dtype(tokenizer.vocab_size))
    inside = np.ones(len(values), bool)
    inside[closing] = False
    values[inside] = ragged.ids
    values[closing] = tokenizer.eos_token_id
    return values, np.diff(ragged.offsets) + 1


def write_shard(
    path: Path, parts: list[tuple[np.ndarray, np.ndarray]], dtype: np.dtype
) -> tuple[int, int]:
    """Write documents as an Arrow stream of one record batch; returns (documents, tokens).

    `parts` are pairs of the ids and the documents' lengths. Raises `DataError` where a shard would
    have more tokens than its 31-bit offsets address.
    """
    values = np.concatenate([np.zeros(0, dtype), *(ids for ids, _ in parts)])
    sizes = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths in parts)])
    if len(values) > LARGEST_DOCUMENT:
        raise DataError(
            f"data.partition_megabytes: a partition has {len(values)} tokens, a shard holds "
            f"{LARGEST_DOCUMENT} at most; take a smaller one"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    schema = pa.schema(
        [pa.field("input_ids", rows.type)],
        {"huggingface": json.dumps({"info": {"features": features(dtype)}})},
    )
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays([rows], schema=schema))
    return len(sizes), len(values)


def features(dtype: np.dtype) -> dict[str, object]:
    """The columns of a shard in the words of the `datasets` library."""
    value = {"dtype": dtype.name, "_type": "Value"}
    return {"input_ids": {"feature": value, "_type": "List"}}


def serve(parent: int, device: str) -> None:
    """Make the partitions asked for on standard input until it closes; die with `parent`."""
    die_with_parent(parent)
    # Whatever a library prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")

    tokenizer: Tokenizer | None = None
    for line in sys.stdin:
        task = PartitionTask.model_validate_json(line)
        try:
            tokenizer = tokenizer or load_saved(task.tokenizer_dir, task.tokenizer_spec, device)
            record = make_partition(task, tokenizer, lambda count: answer(bytes=count))
        except UserError as error:
            answer(error=str(error), kind=type(error).__name__)
        else:
            answer(record=record.model_dump(mode="json"))


def error_from(answer: dict[str, str]) -> UserError:
    """The error that a worker reported, in its own type."""
    kind: type[UserError] = getattr(errors, answer["kind"], UserError)
    return kind(answer["error"])


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s | %(message)s")
    serve(int(sys.argv[1]), sys.argv[2])
