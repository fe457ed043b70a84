"""Numerical conventions of the memory, shared by all implementations."""

from __future__ import annotations

import torch

# Below this normaliser σ(q)·z a read counts as empty: the memory is empty, or every product of
# features has underflowed. Its square is well inside float32's range, so dividing by a larger
# normaliser cannot overflow, nor can the gradient of that division.
EMPTY_MASS = 1e-18

# What the features of a residual memory multiply keys and queries by, before the softmax: found by
# `benchmarks.memory_gain`.
SHARPNESS = 2.0

# Where the gates of a residual memory start, before sigmoid and softplus: a token writes 90% of its
# value, and lets 0.01% fade of what the memory holds. With 0.1%, text is learned as well, and pass
# keys are lost at four times the trained length (`benchmarks.passkey`).
WRITE_START, FORGET_START = 2.2, -9.0

# Epsilon of the RMSNorm of what is read from a residual memory.
READ_EPSILON = 1e-6


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the memory for activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
