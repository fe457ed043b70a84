"""Words of a text and their ids, on a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from infini_model.data.tokenizers.gpu.pretokens import TextBytes
from infini_model.data.tokenizers.gpu.ragged import ranges, starts_of


class Words(NamedTuple):
    """The W words of a text: `starts` int32 [W + 1] in bytes; each ends where the next starts."""

    text: TextBytes
    starts: torch.Tensor

    def __len__(self) -> int:
        """W."""
        return len(self.starts) - 1

    def lengths(self, which: torch.Tensor) -> torch.Tensor:
        """The lengths in bytes of words int [n], as int64 [n]."""
        return (self.starts[which + 1] - self.starts[which]).long()

    def strings(self, which: torch.Tensor) -> list[str]:
        """The words int [n] on the host."""
        lengths = self.lengths(which)
        data = self.text.padded[ranges(self.starts[which].long(), lengths)].cpu().numpy()
        buffers = [None, pa.py_buffer(starts_of(lengths).cpu().numpy()), pa.py_buffer(data)]
        strings: list[str] = pa.Array.from_buffers(
            pa.large_string(), len(which), buffers
        ).to_pylist()
        return strings


def values_of(firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The values of words: how many ids each has, and where in the pool they are, int64 [n].

    Instead of its place, the first number of a word with one id is the id itself.
    """
    return firsts << 32 | counts << 1 | 1


class Pool:
    """A growing array on a device, whose memory doubles when it is full."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.zeros(1 << 16, dtype=dtype, device=device)
        self.used = 0

    def reserve(self, lengths: torch.Tensor) -> torch.Tensor:
        """Room for rows of these lengths, int64 [n]; returns where each starts, int64 [n]."""
        offsets = starts_of(lengths) + self.used
        last = int(offsets[-1])
        # Chunks of 8 bytes are read two at a time.
        if last >= len(self.values):
            larger = self.values.new_zeros(2 * last)
            larger[: self.used] = self.values[: self.used]
            self.values = larger
        self.used = last
        return offsets[:-1]


def words_of(contents: list[bytes], padding: int, device: torch.device) -> Words:
    """Words with these contents, none of them empty."""
    data = np.frombuffer(b"".join(contents), np.uint8)
    padded = np.zeros(-(-len(data) // 8) * 8 + padding, np.uint8)
    padded[: len(data)] = data
    starts = np.cumsum([0, *map(len, contents)], dtype=np.int32)
    text = TextBytes(torch.from_numpy(padded).to(device), len(data))
    return Words(text, torch.from_numpy(starts).to(device))
