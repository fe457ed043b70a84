"""The buffers of Arrow string arrays, and how much one array can hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

# Offsets into an Arrow string array, or a list array, are signed 32-bit integers.
MAX_OFFSET = (1 << 31) - 1


def string_buffers(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """The buffers of a string array, without a copy: offsets int32 [n + 1] into bytes uint8."""
    if not len(texts):
        return np.zeros(1, np.int32), np.zeros(0, np.uint8)
    _, offsets, data = texts.buffers()
    first = texts.offset
    return (
        np.frombuffer(offsets, np.int32)[first : first + len(texts) + 1],
        np.frombuffer(data or b"", np.uint8),
    )
