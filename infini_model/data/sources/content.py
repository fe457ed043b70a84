"""Content hashes of documents, and the split that they decide.

The hash is the first 16 bytes of the SHA-256 of the document's UTF-8, as a high and a low 64-bit
word. Its last bits choose the split, so a document stays in its split for ever.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pyarrow as pa

from infini_model.config import SplitsConfig
from infini_model.data.sources.string_arrays import string_buffers


def hash_documents(texts: pa.StringArray) -> np.ndarray:
    """The content hashes of documents: uint64 [n, 2], the high word and the low word."""
    offsets, buffer = string_buffers(texts)
    data, sha256 = buffer.data, hashlib.sha256
    # With the processor's SHA instructions it is twice as fast as hashes designed for speed.
    digests = b"".join(
        [sha256(data[start:end]).digest() for start, end in pairwise(offsets.tolist())]
    )
    return np.frombuffer(digests, ">u8").reshape(-1, 4)[:, :2].astype(np.uint64)


def splits_of(hashes: np.ndarray, splits: SplitsConfig) -> np.ndarray:
    """The split of each hash, int64 [n]: 0 train, 1 validation, 2 test, by its last bits."""
    place = (hashes[:, 1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    validation_ends = 1.0 if splits.test == 0.0 else splits.train + splits.validation
    return (place >= splits.train).astype(np.int64) + (place >= validation_ends)
