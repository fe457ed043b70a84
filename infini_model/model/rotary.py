"""Rotary embedding of queries and keys (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from infini_model.config import RopeScaling

Rope = tuple[Tensor, Tensor]


def rope_tables(
    length: int, head_dim: int, theta: float, scaling: RopeScaling | None = None, *, before: int = 0
) -> Rope:
    """cos and sin of the rotary embedding at positions from −before to length − 1, on the CPU.

    Each is [before + length, head_dim] float32. `scaling` changes the frequencies as Hugging Face's
    `rope_type` of that name does.
    """
    # The device is explicit because a model may be built on `meta`, and no file holds these tables.
    even = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    position = torch.arange(-before, length, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / theta ** (even / head_dim)
    if scaling is not None:
        kept = _share_kept(frequencies, theta, scaling)
        frequencies = frequencies * (kept + (1.0 - kept) / scaling.factor)
    angles = torch.outer(position, frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _share_kept(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Return the share of each frequency that is not scaled, of the shape of `frequencies` [D / 2].

    llama3 is by Llama 3.1 (The Llama 3 Herd of Models, arXiv 2407.21783), yarn by section 3.2 of
    arXiv 2309.00071, with the borders of its ramp rounded to whole dimensions.
    """
    length = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if length is None:  # linear has none of these
        return torch.zeros_like(frequencies)
    if low is not None and high is not None:  # only llama3 has these
        turns = length * frequencies / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0.0, 1.0)

    def dimension(turns: float) -> float:
        """Return the one of the D dimensions that turns so often in the original length."""
        return len(frequencies) * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(dimension(scaling.beta_fast or 32)), 0)
    last = min(math.ceil(dimension(scaling.beta_slow or 1)), 2 * len(frequencies) - 1)
    place = torch.arange(len(frequencies), dtype=torch.float32, device="cpu")
    return 1.0 - ((place - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def query_scale(scaling: RopeScaling | None) -> float:
    """Return the factor of queries by which yarn sharpens the attention (arXiv 2309.00071, eq. 22).

    Hugging Face multiplies both queries and keys, where they are rotated, by its root.
    """
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return (scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0) ** 2


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of `x` [..., L, D] by `rope` = (cos, sin), each broadcast to [..., L, D].

    Dimension i is paired with i + D / 2, as in Hugging Face's Llama. It is computed in float32
    (float64 for float64) if the tables are float32, and the dtype of `x` is kept. The tables get
    no gradient.
    """
    out: Tensor = _Rotation.apply(x, *rope)  # type: ignore[no-untyped-call]
    return out


class _Rotation(torch.autograd.Function):
    """The rotation; its gradient is the inverse rotation, computed as precisely in as few passes.

    Autograd would round both terms of the gradient to the dtype of `x` before it adds them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.size(-1) // 2
        wide = x.to(torch.promote_types(x.dtype, cos.dtype))
        out = wide * cos
        out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(wide[..., :half], sin[..., half:])
        # A cast to the same dtype returns its input, and for that PyTorch 2.11 compiles a gradient
        # of 0.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, (cos, -sin.roll(sin.size(-1) // 2, dims=-1))), None, None
