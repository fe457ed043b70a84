"""Rotary embedding of queries and keys (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of `x` [..., L, D] by `rope` = (cos, sin), each broadcast to [..., L, D].

    The halves of a head are the pairs, as in Hugging Face's Llama. The dtype of `x` is kept.
    """
    cos, sin = rope
    half = x.size(-1) // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(half, dims=-1), signed).to(x.dtype)
