"""Random numbers that are a pure function of a seed and a key.

They are integer arithmetic, so that the CPU, any GPU and any number of processes draw the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014), with its
# constants as signed integers. 2^64 / golden ratio is also a step of the Weyl sequence, 2^64 · √2
# the other.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_ROOT = 0x6A09E667F3BCC909
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def hashed(*parts: Tensor | int) -> Tensor:
    """A hash of integers, int64 [...], of the shape that the tensors among `parts` broadcast to."""
    state: Tensor | int = 0
    for part in parts:
        state = _mixed(torch.as_tensor(state + part) + GOLDEN)
    return torch.as_tensor(state)


def uniform(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) from int64 `bits`, float64 of the same shape: the upper 53 bits of each."""
    return _shifted(bits, 11).double() * 2.0**-53


def spread_evenly(seed: int, keys: Tensor, blocks: Tensor | int = 0) -> Tensor:
    """Numbers in [0, 1) for int64 `keys` and blocks of each, float64; a Weyl sequence in both.

    Any run of consecutive keys fills the interval evenly: their discrepancy is O(log n / n), where
    independent numbers have O(n^-1/2). So does any run of consecutive blocks of a key.
    """
    return uniform(hashed(seed).to(keys.device) + keys * GOLDEN + blocks * _ROOT)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x` shifted to the right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
