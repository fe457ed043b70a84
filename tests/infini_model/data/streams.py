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

INT32 = np.dtype(np.int32)
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


def _numbered_shards(folder: Path, shape: Sequence[Sequence[int]]) -> list[Shard]:
    """Write shards of documents of these lengths, with the tokens 1, 2, 3 …"""
    records, first = [], 1
    for number, lengths in enumerate(shape):
        values = np.arange(first, first + sum(lengths), dtype=np.int32)
        first += len(values)
        records.append(write_shard(folder / f"{number}.arrow", values, lengths))
    return records


def numbered_stream(folder: Path, shape: Sequence[Sequence[int]], **options: int) -> TokenStream:
    """Shards of documents of these lengths, with the tokens 1, 2, 3 … in a folder in `folder`."""
    within = Path(tempfile.mkdtemp(dir=folder))
    records = _numbered_shards(within, shape)
    return TokenStream(ShardFiles(within, records, INT32, **options), 0)


def stored_stream(
    folder: Path, bucket: str, shape: Sequence[Sequence[int]], absent: Sequence[int]
) -> tuple[TokenStream, TokenStream, list[Shard]]:
    """A numbered stream in a folder; the same with the shards `absent` in a bucket; its records."""
    whole = Path(tempfile.mkdtemp(dir=folder))
    part = Path(tempfile.mkdtemp(dir=folder))
    records = [
        dataclasses.replace(shard, path=f"{part.name}/{shard.file}")
        for shard in _numbered_shards(whole, shape)
    ]
    for number, shard in enumerate(records):
        if number in absent:
            ObjectStore(bucket).upload(shard.path, whole / shard.file)
        else:
            os.link(whole / shard.file, part / shard.file)
    elsewhere = np.isin(np.arange(len(shape)), absent)
    stored = StoredShards(part, records, INT32, bucket, elsewhere)
    local = ShardFiles(whole, records, INT32)
    return TokenStream(local, 0), TokenStream(stored, 0), records


def reading_threads() -> int:
    """How many threads of this process read from stores."""
    return sum(thread.name.startswith("ranges") for thread in threading.enumerate())
