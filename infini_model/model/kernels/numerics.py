"""The precision of a memory, which its definition and every kernel share."""

from __future__ import annotations

import torch

# Weights that sum to less than this have found nothing: the memory is empty, or every product of
# features has underflowed. Its square is well inside float32, so that neither a division by more
# than it nor the gradient of that can overflow.
NOTHING_FOUND = 1e-18


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a memory beside activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
