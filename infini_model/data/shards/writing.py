"""Writing the shards of one split of a partition: Arrow streams of one record batch each.

The values buffer of a shard is its token stream, and the offsets buffer its document starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import Shard, Split
from infini_model.data.sources.string_arrays import MAX_OFFSET
from infini_model.data.tokenizers.tokenizer import Ragged
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError

# A shard is written once it holds this many bytes of ids, so that memory stays bounded.
SHARD_BYTES = 64 << 20


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and int32 that holds every id."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


class Rows(NamedTuple):
    """Documents as binary rows, followed by a row for each token that goes around every one.

    `around` is the number of those: 2 if documents have a token that begins them, else 1; the
    last row is the end-of-text token. `each` is the number of rows of a document: 2 if these are
    its prompt and its answer, else 1.
    """

    array: pa.LargeBinaryArray
    around: int
    each: int


class Closed(NamedTuple):
    """Documents begun and ended; `prompts` int32 [documents] counts the tokens of their prompts.

    The token that begins a document belongs to its prompt. None if there are no prompts.
    """

    tokens: Ragged
    prompts: np.ndarray | None


class ShardWriter:
    """Appends documents to the shards of one split.

    The files are `<folder>/<split>-<number>.arrow`, ids of type `dtype`.
    """

    def __init__(self, folder: Path, key: str, split: Split, dtype: np.dtype) -> None:
        self._folder, self._key, self._split, self._dtype = folder, key, split, dtype
        self._pending: list[Closed] = []
        self._pending_tokens = 0
        self._shards: list[Shard] = []

    def add(self, documents: Rows, rows: np.ndarray) -> None:
        """Append the documents `rows` of `as_rows`. Raises `OSError` on a full disk."""
        closed = _close(documents, rows, self._dtype)
        size = len(closed.tokens.ids)
        total = self._pending_tokens + size
        if self._pending and total * self._dtype.itemsize > SHARD_BYTES:
            self._flush()
        self._pending.append(closed)
        self._pending_tokens += size

    def close(self) -> list[Shard]:
        """Write what is pending; returns the records of all shards."""
        if self._pending:
            self._flush()
        return self._shards

    def _flush(self) -> None:
        documents, prompts = _concatenate(self._pending)
        self._pending, self._pending_tokens = [], 0
        name = f"{self._split}-{len(self._shards)}.arrow"
        path = self._folder / name
        write_shard(path, documents, prompts)
        self._shards.append(
            Shard(
                file=name,
                path=f"{self._key}/{name}",
                documents=len(documents.offsets) - 1,
                tokens=len(documents.ids),
                bytes=path.stat().st_size,
                sha256=storage.sha256(path),
            )
        )


def as_rows(
    encoded: Ragged,
    dtype: np.dtype,
    eos_token_id: int,
    bos_token_id: int | None = None,
    *,
    each: int = 1,
) -> Rows:
    """Documents as rows of `dtype`, and the tokens that begin and end each.

    `each` is the number of texts that make a document.

    Arrow takes binary rows whole, but lists number by number.
    """
    around = [eos_token_id] if bos_token_id is None else [bos_token_id, eos_token_id]
    ids = np.empty(len(encoded.ids) + len(around), dtype)
    ids[: -len(around)] = encoded.ids
    ids[-len(around) :] = around
    ends = np.arange(len(encoded.ids), len(ids)) + 1
    offsets = np.append(encoded.offsets, ends) * dtype.itemsize
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(ids)]
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
    return Rows(array, len(around), each)


def _close(documents: Rows, rows: np.ndarray, dtype: np.dtype) -> Closed:
    """The documents `rows` in this order, each with the tokens that go around it."""
    array, own = documents.array, documents.each
    each = own + documents.around
    chosen = np.empty((len(rows), each), np.int64)
    chosen[:, : -own - 1] = len(array) - 2
    chosen[:, -own - 1 : -1] = own * rows[:, None] + np.arange(own)
    chosen[:, -1] = len(array) - 1
    _, ends, data = array.take(pa.array(chosen.reshape(-1))).buffers()
    edges = np.frombuffer(ends, np.int64)[: each * len(rows) + 1] // dtype.itemsize
    offsets = edges[::each]
    tokens = Ragged(np.frombuffer(data, dtype)[: offsets[-1]], offsets)
    if own == 1:
        return Closed(tokens, None)
    return Closed(tokens, (edges[each - 2 :: each] - offsets[:-1]).astype(np.int32))


def _concatenate(parts: list[Closed]) -> Closed:
    """Documents of several batches as one."""
    tokens = [part.tokens for part in parts]
    starts = np.cumsum([0, *(len(part.ids) for part in tokens)])
    offsets = [part.offsets[1:] + start for part, start in zip(tokens, starts, strict=False)]
    ids = np.concatenate([part.ids for part in tokens])
    prompts = [part.prompts for part in parts if part.prompts is not None]
    whole = Ragged(ids, np.concatenate([[0], *offsets]))
    return Closed(whole, np.concatenate(prompts) if prompts else None)


def write_shard(path: Path, documents: Ragged, prompts: np.ndarray | None = None) -> None:
    """Write documents, begun and ended, as an Arrow stream of one record batch.

    `prompts` int32 [documents] is how many tokens of each are its prompt, if they have prompts.

    Raises `DataError` if there are more tokens than 31-bit offsets can address.
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


def features(dtype: np.dtype, *, pairs: bool = False) -> dict[str, object]:
    """The columns of a shard as the `datasets` library describes them."""
    value = {"dtype": dtype.name, "_type": "Value"}
    columns: dict[str, object] = {"input_ids": {"feature": value, "_type": "List"}}
    if pairs:
        columns["prompt_length"] = {"dtype": "int32", "_type": "Value"}
    return columns
