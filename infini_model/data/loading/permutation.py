"""A keyed permutation of 0 … n - 1 in constant memory: the order of the windows.

A Feistel network is a bijection on 2b-bit numbers for any round function. Results of n or more are
fed back in until they are below n (cycle walking), which makes it a bijection on 0 … n - 1. So the
window at position p of an epoch depends only on (seed, epoch, p).
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def permute(positions: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of `positions` (0 … size - 1) to its place in its epoch: int64, the same shape.

    `epochs` has the shape of `positions`. For a given seed and epoch the map is a bijection.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    key = _mix(
        _mix(np.full(1, seed % (1 << 64), np.uint64) + np.uint64(GOLDEN)) ^ epochs.astype(np.uint64)
    )
    values = positions.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        left, right = values[todo] >> half, values[todo] & low
        for turn in range(ROUNDS):
            salt = key[todo] + np.uint64((turn + 1) * GOLDEN % (1 << 64))
            left, right = right, left ^ (_mix(right + salt) & low)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= size]
    return values.astype(np.int64)
