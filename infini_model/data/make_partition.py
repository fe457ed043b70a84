"""A partition: a part of the source as token shards, made in one pass.

`make_partition` is a pure function of a small spec, which any process on any machine can run: it
reads the files' ranges, tokenises the documents batch by batch and writes the shards of the three
splits. Its memory does not grow with the partition, and making one twice does no harm.

A shard is an Arrow stream of one record batch: the values buffer of its lists is the token stream,
the offsets buffer the document starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import SPLITS, Shard, Split, array_starts
from infini_model.data.partitions import PartitionRecord, PartitionSpec
from infini_model.data.sources.formats import read_documents
from infini_model.data.sources.pairs import TEXTS, join
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
    pairs = spec.reading.template is not None
    each = TEXTS if pairs else 1
    rows_each = each + (1 if spec.tokenizer.bos_token_id is None else 2)
    writers = {
        split: ShardWriter(folder, spec.key, split, dtype, rows_each, pairs=pairs)
        for split in SPLITS
    }
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
    rows = as_rows(ragged, dtype, record.eos_token_id, record.bos_token_id, each)
    for number, writer in enumerate(writers.values()):
        documents = np.flatnonzero(split_of == number)
        if len(documents):
            writer.add(rows.take(documents))


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds every id."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


class Rows(NamedTuple):
    """Documents as binary rows, followed by a row for each special token that goes around one.

    `special_tokens` is the number of those: 2 if documents have a token that begins them, else 1;
    the last row is the end-of-text token. `each` is the number of rows of a document: 2 if these
    are its prompt and its answer, else 1.
    """

    array: pa.LargeBinaryArray
    special_tokens: int
    each: int

    def take(self, documents: np.ndarray) -> pa.LargeBinaryArray:
        """The rows of `documents` int64 [n] in this order, each with those that go around it."""
        own = self.each
        chosen = np.empty((len(documents), own + self.special_tokens), np.int64)
        chosen[:, : -own - 1] = len(self.array) - 2
        chosen[:, -own - 1 : -1] = own * documents[:, None] + np.arange(own)
        chosen[:, -1] = len(self.array) - 1
        return self.array.take(pa.array(chosen.reshape(-1)))


class ShardWriter:
    """Appends documents to the shards of one split.

    The files are `<folder>/<split>-<number>.arrow`, ids of type `dtype`. A document has
    `rows_each` rows; if it has a prompt, that ends before the last two.
    """

    def __init__(
        self, folder: Path, key: str, split: Split, dtype: np.dtype, rows_each: int, *, pairs: bool
    ) -> None:
        self._folder, self._key, self._split, self._dtype = folder, key, split, dtype
        self._rows_each, self._pairs = rows_each, pairs
        self._pending: list[pa.LargeBinaryArray] = []
        self._pending_bytes = 0
        self._shards: list[Shard] = []

    def add(self, rows: pa.LargeBinaryArray) -> None:
        """Append the rows of documents. Raises `OSError` on a full disk."""
        size = len(_buffers(rows)[1])
        if self._pending and self._pending_bytes + size > SHARD_BYTES:
            self._flush()
        self._pending.append(rows)
        self._pending_bytes += size

    def close(self) -> list[Shard]:
        """Write what is pending; returns the records of all shards."""
        if self._pending:
            self._flush()
        return self._shards

    def _flush(self) -> None:
        ends, data = _buffers(pa.concat_arrays(self._pending))
        self._pending, self._pending_bytes = [], 0
        edges, each = ends // self._dtype.itemsize, self._rows_each
        documents = Ragged(data.view(self._dtype), edges[::each])
        prompts = None
        if self._pairs:
            # The token that begins a document belongs to its prompt.
            prompts = (edges[each - 2 :: each] - edges[:-1:each]).astype(np.int32)
        name = f"{self._split}-{len(self._shards)}.arrow"
        path = self._folder / name
        self._shards.append(
            Shard(
                file=name,
                path=f"{self._key}/{name}",
                documents=len(documents.offsets) - 1,
                tokens=len(documents.ids),
                start=write_shard(path, documents, prompts),
                bytes=path.stat().st_size,
                sha256=storage.sha256(path),
            )
        )


def as_rows(
    encoded: Ragged, dtype: np.dtype, eos_token_id: int, bos_token_id: int | None, each: int
) -> Rows:
    """Documents as rows of `dtype`, and the tokens that begin and end each.

    `each` is the number of texts that make a document.

    Arrow takes binary rows whole, but lists number by number.
    """
    special_tokens = [eos_token_id] if bos_token_id is None else [bos_token_id, eos_token_id]
    ids = np.empty(len(encoded.ids) + len(special_tokens), dtype)
    ids[: -len(special_tokens)] = encoded.ids
    ids[-len(special_tokens) :] = special_tokens
    ends = np.arange(len(encoded.ids), len(ids)) + 1
    offsets = np.append(encoded.offsets, ends) * dtype.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(ids)]
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return Rows(array, len(special_tokens), each)


def _buffers(rows: pa.LargeBinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """Where rows start, and the last one ends, int64 [rows + 1], in their bytes, uint8."""
    _, offsets, data = rows.buffers()
    edges = np.frombuffer(offsets, np.int64)[: len(rows) + 1]
    return edges, np.frombuffer(data or b"", np.uint8)[: edges[-1]]


def write_shard(path: Path, documents: Ragged, prompts: np.ndarray | None = None) -> int:
    """Write documents, begun and ended, as an Arrow stream of one record batch.

    `prompts` int32 [documents] is how many tokens of each are its prompt, if they have prompts.
    Returns `Shard.start`. Raises `DataError` if there are more tokens than 31-bit offsets can
    address.
    """
    ids, offsets = documents
    if len(ids) > MAX_OFFSET:
        raise DataError(f"a document has {len(ids)} tokens; a shard holds at most {MAX_OFFSET}")
    rows = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
    described = features(ids.dtype, pairs=prompts is not None)
    columns = [rows] if prompts is None else [rows, pa.array(prompts)]
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
    """Where the buffers of a shard begin in its file; an empty one may be nowhere."""
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
        batch = pa.ipc.open_stream(whole).read_next_batch()
        _, offsets, _, values = batch.column(0).buffers()
        prompts = [column.buffers()[1] for column in batch.columns[1:]]
        found = (offsets, values, *prompts)
        return tuple(buffer.address - whole.address if buffer else 0 for buffer in found)


def features(dtype: np.dtype, *, pairs: bool = False) -> dict[str, object]:
    """The columns of a shard as the `datasets` library describes them."""
    value = {"dtype": dtype.name, "_type": "Value"}
    columns: dict[str, object] = {"input_ids": {"feature": value, "_type": "List"}}
    if pairs:
        columns["prompt_length"] = {"dtype": "int32", "_type": "Value"}
    return columns
