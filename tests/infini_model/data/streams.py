"""Token streams of given documents, in shard files as the pipeline writes them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infini_model.data import make_partition
from infini_model.data.loading.stream import TokenStream
from infini_model.data.manifest import Shard
from infini_model.data.tokenizers.tokenizer import Ragged


def write_shard(path: Path, values: np.ndarray, lengths: Sequence[int]) -> Shard:
    """Write documents of these lengths, in tokens; returns the manifest's record."""
    documents = Ragged(values, np.cumsum([0, *lengths]))
    hashes = np.zeros(len(lengths), np.uint64)
    start = make_partition.write_shard(path, documents, hashes)
    return Shard(
        file=path.name,
        path="",
        documents=len(lengths),
        tokens=len(values),
        start=start,
        bytes=path.stat().st_size,
        sha256="",
    )


def stream_of(folder: Path, shards: Sequence[Shard], **options: Any) -> TokenStream:
    """The stream of shards of int32 tokens in a folder."""
    files = [shard.file for shard in shards]
    return TokenStream(folder, files, shards, np.dtype(np.int32), 0, **options)


def numbered_stream(
    folder: Path, shape: Sequence[Sequence[int]], first: int = 1, **options: Any
) -> TokenStream:
    """Shards of documents of these lengths, with the tokens 1, 2, 3 … in a folder in `folder`."""
    within, records = Path(tempfile.mkdtemp(dir=folder)), []
    for number, lengths in enumerate(shape):
        values = np.arange(first, first + sum(lengths), dtype=np.int32)
        first += len(values)
        records.append(write_shard(within / f"{number}.arrow", values, lengths))
    return stream_of(within, records, **options)
