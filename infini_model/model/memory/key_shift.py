"""The key shift: a value is written under a mix of its own token's key and the previous token's.

The query shift is the same for the queries that read the memory. A masked token does not know what
it is to ask for; with the shift, the token before it asks.

On CUDA forward and backward are one Triton kernel each, for what `operator` takes: what autograd
derives makes a dozen passes over the sequence, each with a result as large as the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.memory_ops import operator


def with_previous(
    x: Tensor, share: Tensor | None, previous: Tensor | None, starts: Tensor | None
) -> Tensor:
    """lerp(x_t, x_{t−1}, μ) of keys or queries [B, H, T, D].

    `share` is μ, [H]; None shifts nothing. `previous` is that of the token before the first, [B, H,
    D], if there is one. A document's first token, where `starts` [B, T] is true, keeps its own.
    """
    if share is None:
        return x
    shares = share.to(x.dtype)[:, None].expand(x.shape[:3])
    if starts is not None:
        shares = shares.masked_fill(starts[:, None], 0.0)
    if previous is None:
        return shifted_keys(x, functional.pad(shares[:, :, 1:], (1, 0)))
    x = torch.cat((previous.unsqueeze(2).to(x.dtype), x), dim=2)
    return shifted_keys(x, functional.pad(shares, (1, 0)))[:, :, 1:]


def streams_with_previous(
    x: Tensor, share: Tensor | None, starts: Tensor | None, rows: int, segment_length: int
) -> Tensor:
    """`with_previous` for n streams of the same documents: rows i, B + i, 2B + i, … are of one.

    What precedes a segment is always the first stream's token: the segments of the other streams
    know nothing of each other. `x` is [n · B, H, T, D], `rows` is B, and T is a multiple of
    `segment_length`.
    """
    if share is None:
        return x
    streams, first = len(x) // rows, torch.arange(x.size(2), device=x.device) == 0
    starts = first.expand(rows, -1) if starts is None else starts | first
    segments = x.view(*x.shape[:2], -1, segment_length, x.size(3)).transpose(1, 2)
    last = segments[:rows, :, :, -1]
    out = with_previous(
        segments.flatten(0, 1),
        share,
        last.roll(1, dims=1).flatten(0, 1).repeat(streams, 1, 1),
        starts.reshape(-1, segment_length).repeat(streams, 1),
    )
    return out.view_as(segments).transpose(1, 2).flatten(2, 3)


@operator("shift", lambda *inputs: torch.empty_like(inputs[0]))
def shifted_keys(keys: Tensor, share: Tensor) -> Tensor:
    """Return lerp(k_t, k_{t−1}, μ_t) of `keys` [B, H_kv, T, D], of their shape and dtype.

    `share` is μ_t, [B, H_kv, T], of the same dtype; 0 for the first token, which keeps its own key.
    """
    before = torch.cat((keys[:, :, :1], keys[:, :, :-1]), dim=2)
    return torch.lerp(keys, before, share.unsqueeze(-1))
