"""Kernels from bits to the places where they are set, ascending."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits(packed: tl.tensor, at: tl.tensor) -> tl.tensor:
    return (tl.load(packed + (at >> 5)) >> (at & 31)) & 1


@triton.jit
def count_bits(packed: tl.tensor, counts: tl.tensor, BYTES: tl.constexpr) -> None:
    """How many of each program's `BYTES` bits are set; `counts` int32 [programs]."""
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    tl.store(counts + tl.program_id(0), tl.sum(_bits(packed, at)))


@triton.jit
def place_bits(
    packed: tl.tensor, offsets: tl.tensor, places: tl.tensor, BYTES: tl.constexpr
) -> None:
    """The indices of bits that are set; `offsets` int64 [programs] is where a program writes."""
    at = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    bits = _bits(packed, at)
    rank = tl.cumsum(bits, 0) - bits
    tl.store(places + tl.load(offsets + tl.program_id(0)) + rank, at, bits == 1)
