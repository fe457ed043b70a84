"""Token streams of given documents, in shard files as the pipeline writes them."""

import dataclasses
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model.data.manifest import Shard
from infini_model.data.shards.shard_files import ShardFiles
from infini_model.data.shards.stored.shards import StoredShards
from infini_model.data.shards.stream import TokenStream
from infini_model.runtime.object_stores.object_store import ObjectStore

FEATURES = '{"info": {"features": {"input_ids": {"feature": {"dtype": "int32"}}}}}'


def write_shard(path: Path, values: np.ndarray, lengths: Sequence[int]) -> Shard:
    """Write documents of these lengths, in tokens; returns the manifest's record."""
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    schema = pa.schema([pa.field("input_ids", rows.type)], {"huggingface": FEATURES})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        out.write_batch(pa.RecordBatch.from_arrays([rows], schema=schema))
    return record(path, len(lengths), len(values))


def record(path: Path, documents: int, tokens: int) -> Shard:
    """The manifest's record of a shard."""
    return Shard(
        file=path.name,
        path="",
        documents=documents,
        tokens=tokens,
        bytes=path.stat().st_size,
        sha256="",
    )


def numbered_stream(
    folder: Path, shape: Sequence[Sequence[int]], eos: int = 0, **options: int
) -> TokenStream:
    """Shards of documents of these lengths, with the tokens 1, 2, 3 … in a folder in `folder`."""
    within = Path(tempfile.mkdtemp(dir=folder))
    records, first = [], 1
    for number, lengths in enumerate(shape):
        values = np.arange(first, first + sum(lengths), dtype=np.int32)
        first += len(values)
        records.append(write_shard(within / f"{number}.arrow", values, lengths))
    return TokenStream(ShardFiles(within, records, np.dtype(np.int32), **options), eos)


def stored_stream(
    folder: Path, bucket: str, shape: Sequence[Sequence[int]], absent: Sequence[int], eos: int = 0
) -> tuple[TokenStream, TokenStream, list[Shard]]:
    """A numbered stream in a folder; the same with the shards `absent` in a bucket; its records."""
    whole = Path(tempfile.mkdtemp(dir=folder))
    part = Path(tempfile.mkdtemp(dir=folder))
    records, first = [], 1
    for number, lengths in enumerate(shape):
        values = np.arange(first, first + sum(lengths), dtype=np.int32)
        first += len(values)
        name = f"{number}.arrow"
        shard = write_shard(whole / name, values, lengths)
        records.append(dataclasses.replace(shard, path=f"{part.name}/{name}"))
        if number in absent:
            ObjectStore(bucket).upload(records[-1].path, whole / name)
        else:
            os.link(whole / name, part / name)
    dtype = np.dtype(np.int32)
    elsewhere = np.isin(np.arange(len(shape)), absent)
    stored = StoredShards(part, records, dtype, bucket, elsewhere)
    return (
        TokenStream(ShardFiles(whole, records, dtype), eos),
        TokenStream(stored, eos),
        records,
    )


def reading_threads() -> int:
    """How many threads of this process read from stores."""
    return sum(thread.name.startswith("ranges") for thread in threading.enumerate())
