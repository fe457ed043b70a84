"""Rows of different lengths in one tensor, on any device."""

from __future__ import annotations

import torch


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """The offsets of rows with these lengths [n]: int64 [n + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The concatenation of `starts[i]`, `starts[i] + 1`, …, `lengths[i]` numbers for each row.

    `starts` and `lengths` int64 [n]; the result is int64 [sum(lengths)].
    """
    offsets = starts_of(lengths)
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=total)
    return shift + torch.arange(total, device=starts.device)
