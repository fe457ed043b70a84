"""A partition: a part of the source as token shards, made in one pass.

`make_partition` is a pure function of a small spec, which any process on any machine can run: it
reads the files' ranges, tokenises the documents batch by batch and writes the shards of the three
splits. Its memory does not grow with the partition, and making one twice does no harm.

A shard is an Arrow stream of one record batch: the values buffer of its lists is the token stream,
the offsets buffer the document starts. Beside each document is a hash of its text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infini_model.data.manifest import SPLITS, Shard, Split, array_starts
from infini_model.data.partitions import PartitionRecord, PartitionSpec
from infini_model.data.sources.formats import read_documents
from infini_model.data.sources.text import MAX_OFFSET, hash_documents, splits_of, string_buffers
from infini_model.data.tokenizers.tokenizer import Ragged, Tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

log = logging.getLogger(__name__)

# The most text encoded at once, unless a single document is longer.
ENCODE_BYTES = 8 << 20
# One text in so many, and always the first, is compared with the reference.
SAMPLE_EVERY = 1000
# A shard is written once it holds this many bytes of ids, so that memory stays bounded.
SHARD_BYTES = 64 << 20
# Called with the number of bytes done since the last call.
Advance: TypeAlias = Callable[[int], None]


class _TokenMismatchError(Exception):
    """The fast tokenizer and the reference disagree on a document."""


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
    documents = encoded = size = skipped = 0
    for batch in read_documents(spec.ranges, spec.reading, ENCODE_BYTES):
        skipped += batch.skipped
        for texts, edges in slices(batch.texts, batch.edges):
            ragged = tokenizer.encode_batch(texts)
            _verify_sample(tokenizer, texts, ragged, encoded)
            _add(texts, edges, ragged, spec, writers)
            text_bytes = int(np.ptp(string_buffers(texts)[0][[0, -1]]))
            documents += len(edges) - 1
            encoded += len(texts)
            size += text_bytes
            advance(text_bytes)
    shards = {split: writer.close() for split, writer in writers.items()}
    return PartitionRecord(documents=documents, bytes=size, skipped=skipped, shards=shards)


def slices(texts: pa.StringArray, edges: np.ndarray) -> Iterator[tuple[pa.StringArray, np.ndarray]]:
    """The texts of all documents in order, at most `ENCODE_BYTES` at once or one document.

    `edges` int64 [documents + 1], here and beside each part, are those of `DocumentBatch`.
    """
    starts = string_buffers(texts)[0][edges]
    first = 0
    while first < len(edges) - 1:
        limit = np.int32(min(int(starts[first]) + ENCODE_BYTES, MAX_OFFSET))
        last = max(int(np.searchsorted(starts, limit, "right")) - 1, first + 1)
        begin, end = int(edges[first]), int(edges[last])
        yield texts.slice(begin, end - begin), edges[first : last + 1] - begin
        first = last


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
    edges: np.ndarray,
    ragged: Ragged,
    spec: PartitionSpec,
    writers: dict[Split, ShardWriter],
) -> None:
    """Append each document to the shards of its split, which a hash of its texts decides."""
    offsets, data = string_buffers(texts)
    starts = pa.py_buffer(offsets[edges])
    whole = pa.StringArray.from_buffers(len(edges) - 1, starts, pa.py_buffer(data))
    hashes = hash_documents(whole)
    split_of = splits_of(hashes, spec.splits)
    rows = encode_documents(ragged, edges, spec)
    for number, writer in enumerate(writers.values()):
        documents = np.flatnonzero(split_of == number)
        if len(documents):
            taken = [each.take(pa.array(documents)) for each in rows]
            writer.add(taken, hashes[documents, 0])


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds every id."""
    return np.min_scalar_type(vocab_size - 1) if vocab_size <= 1 << 16 else np.dtype(np.int32)


class ShardWriter:
    """Appends documents to the shards of one split.

    The files are `<folder>/<split>-<number>.arrow`, ids of type `dtype`; of conversations they have
    a column more, as `write_shard` says.
    """

    def __init__(self, folder: Path, key: str, split: Split, dtype: np.dtype) -> None:
        self._folder, self._key, self._split, self._dtype = folder, key, split, dtype
        self._pending: list[tuple[list[pa.Array], np.ndarray]] = []
        self._pending_bytes = 0
        self._shards: list[Shard] = []

    def add(self, rows: list[pa.Array], hashes: np.ndarray) -> None:
        """Append documents, and `hashes` uint64 [documents]. Raises `OSError` on a full disk.

        `rows` are those of `encode_documents`.
        """
        size = len(_buffers(rows[0])[1])
        if self._pending and self._pending_bytes + size > SHARD_BYTES:
            self._flush()
        self._pending.append((rows, hashes))
        self._pending_bytes += size

    def close(self) -> list[Shard]:
        """Write what is pending; returns the records of all shards."""
        if self._pending:
            self._flush()
        return self._shards

    def _flush(self) -> None:
        rows, hashes = zip(*self._pending, strict=True)
        self._pending, self._pending_bytes = [], 0
        (edges, data), *turns = (
            _buffers(pa.concat_arrays(each)) for each in zip(*rows, strict=True)
        )
        documents = Ragged(data.view(self._dtype), edges // self._dtype.itemsize)
        learnt = turns[0][1].view(bool) if turns else None
        name = f"{self._split}-{len(self._shards)}.arrow"
        path = self._folder / name
        self._shards.append(
            Shard(
                file=name,
                path=f"{self._key}/{name}",
                documents=len(documents.offsets) - 1,
                tokens=len(documents.ids),
                start=write_shard(path, documents, np.concatenate(hashes), learnt),
                bytes=path.stat().st_size,
                sha256=storage.sha256(path),
            )
        )


def encode_documents(ragged: Ragged, edges: np.ndarray, spec: PartitionSpec) -> list[pa.Array]:
    """The tokens of documents as binary rows, and of conversations which are learned, as others.

    `edges` int64 [documents + 1] are where the texts of each document begin. A conversation teaches
    every second text, and the token that ends it. Arrow takes binary rows whole, but lists number
    by number.
    """
    record, bounds = spec.tokenizer, ragged.offsets[edges]
    ids = ragged.ids.astype(record.dtype, copy=False)
    rows = [_closed_rows(ids, bounds, record.bos_token_id, record.eos_token_id)]
    if spec.reading.conversations is not None:
        counts = np.diff(edges)
        number = np.arange(edges[0], edges[-1]) - np.repeat(edges[:-1], counts)
        learnt = np.repeat(number % 2 == 1, np.diff(ragged.offsets))
        begin = None if record.bos_token_id is None else 0
        rows.append(_closed_rows(learnt, bounds, begin, 1))
    return rows


def _closed_rows(
    values: np.ndarray, bounds: np.ndarray, begin: int | None, end: int
) -> pa.LargeBinaryArray:
    """Rows of bytes between consecutive `bounds` of `values`, each with what begins and ends it."""
    places = pa.py_buffer(bounds.astype(np.int64) * values.itemsize)
    buffers = [None, places, pa.py_buffer(np.ascontiguousarray(values))]
    rows = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
    first, last = (
        pa.scalar(b"" if each is None else values.dtype.type(each).tobytes(), rows.type)
        for each in (begin, end)
    )
    return pc.binary_join_element_wise(first, rows, last, pa.scalar(b"", rows.type))


def _buffers(rows: pa.LargeBinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """Where rows start, and the last one ends, int64 [rows + 1], in their bytes, uint8."""
    _, offsets, data = rows.buffers()
    edges = np.frombuffer(offsets, np.int64)[: len(rows) + 1]
    return edges, np.frombuffer(data or b"", np.uint8)[: edges[-1]]


def write_shard(
    path: Path, documents: Ragged, hashes: np.ndarray, learnt: np.ndarray | None = None
) -> int:
    """Write documents, begun and ended, as an Arrow stream of one record batch.

    `hashes` uint64 [documents] is the column `content_hash`: 8 bytes of the hash of each one's
    texts. `learnt` bool [tokens] is the column `learnt` of conversations: which tokens are learned.
    Returns `Shard.start`. Raises `DataError` if there are more tokens than 31-bit offsets can
    address.
    """
    ids, offsets = documents
    if len(ids) > MAX_OFFSET:
        raise DataError(f"a document has {len(ids)} tokens; a shard holds at most {MAX_OFFSET}")
    starts = pa.array(offsets.astype(np.int32))
    given = [ids] if learnt is None else [ids, learnt]
    columns = [pa.ListArray.from_arrays(starts, pa.array(each)) for each in given]
    columns.append(pa.array(hashes))
    described = features(ids.dtype, conversations=learnt is not None)
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip(described, columns, strict=True)],
        {"huggingface": json.dumps({"info": {"features": described}})},
    )
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    found = _places(path)
    expected = array_starts(found[0], len(offsets) - 1, len(ids), ids.itemsize)
    if len(ids) and found != expected[: len(found)]:
        raise RuntimeError(f"pyarrow {pa.__version__} lays out arrays at {found}, not {expected}")
    return found[0]


def _places(path: Path) -> tuple[int, ...]:
    """Where the arrays of a shard begin in its file; an empty one may be nowhere."""
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
        batch = pa.ipc.open_stream(whole).read_next_batch()
        _, offsets, _, values = batch.column(0).buffers()
        learnt = [column.buffers()[3] for column in batch.columns[1:-1]]
        found = (offsets, values, *learnt)
        return tuple(buffer.address - whole.address if buffer else 0 for buffer in found)


def features(dtype: np.dtype, *, conversations: bool = False) -> dict[str, object]:
    """The columns of a shard as the `datasets` library describes them."""
    kinds = {"input_ids": dtype.name} | ({"learnt": "bool"} if conversations else {})
    lists: dict[str, object] = {
        name: {"feature": {"dtype": kind, "_type": "Value"}, "_type": "List"}
        for name, kind in kinds.items()
    }
    return lists | {"content_hash": {"dtype": "uint64", "_type": "Value"}}
