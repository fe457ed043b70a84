"""The key shift: a value is written under a mix of its own token's key and the previous token's.

The query shift is the same for the queries that read the memory. A masked token does not know what
it is to ask for; with the shift, the token before it asks.

A custom operator with its own backward pass: the one that autograd derives makes a dozen passes
over the sequence, each with a result as large as the keys. On CUDA forward and backward are one
Triton kernel each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.model.kernels.tiling import Chunk, for_each_chunk, scratch


def with_previous(
    x: Tensor, share: Tensor, previous: Tensor | None, starts: Tensor | None
) -> Tensor:
    """lerp(x_t, x_{t−1}, μ); the first token of a document keeps its own.

    Args:
        x: Keys or queries [B, H, T, D].
        share: μ, [H].
        previous: That of the token before the first, [B, H, D]; None if there is none.
        starts: [B, T] bool, true where a document starts.

    Returns:
        [B, H, T, D].
    """
    shares = share.to(x.dtype)[:, None].expand(x.shape[:3])
    if starts is not None:
        shares = shares.masked_fill(starts[:, None], 0.0)
    if previous is None:
        whole: Tensor = shifted_keys(x, functional.pad(shares[:, :, 1:], (1, 0)))
        return whole
    x = torch.cat((previous.unsqueeze(2).to(x.dtype), x), dim=2)
    whole = shifted_keys(x, functional.pad(shares, (1, 0)))
    return whole[:, :, 1:]


def streams_with_previous(x: Tensor, share: Tensor, starts: Tensor, segment_length: int) -> Tensor:
    """`with_previous` for n streams of the same documents: rows i, B + i, 2B + i, … are of one.

    What precedes a segment is always the first stream's token: the segments of the other streams
    know nothing of each other.

    Args:
        x: [n · B, H, T, D]; T is a multiple of `segment_length`.
        share: μ, [H].
        starts: [B, T] bool, true where a document starts.
        segment_length: Tokens of a segment.

    Returns:
        [n · B, H, T, D].
    """
    rows, streams = len(starts), len(x) // len(starts)
    starts = starts | (torch.arange(starts.size(1), device=starts.device) == 0)
    segments = x.view(*x.shape[:2], -1, segment_length, x.size(3)).transpose(1, 2)
    last = segments[:rows, :, :, -1]
    out = with_previous(
        segments.flatten(0, 1),
        share,
        last.roll(1, dims=1).flatten(0, 1).repeat(streams, 1, 1),
        starts.reshape(-1, segment_length).repeat(streams, 1),
    )
    return out.view_as(segments).transpose(1, 2).flatten(2, 3)


@torch.library.custom_op("infini_model::shifted_keys", mutates_args=())
def shifted_keys(keys: Tensor, share: Tensor) -> Tensor:
    """lerp(k_t, k_{t−1}, μ_t); the first token keeps its own key.

    Args:
        keys: [B, H_kv, T, D].
        share: μ_t, [B, H_kv, T], of the dtype of `keys`; 0 for the first token.

    Returns:
        [B, H_kv, T, D].
    """
    out = torch.empty_like(keys)
    out[:, :, 0] = keys[:, :, 0]
    (previous, current), (_, shifted) = _neighbours(keys), _neighbours(out)
    _, shares = _neighbours(share.unsqueeze(-1))

    def shift(chunk: Chunk) -> None:
        torch.lerp(current[chunk], previous[chunk], shares[chunk], out=shifted[chunk])

    for_each_chunk(shift, current, keys.size(1), _token_size(keys))
    return out


@shifted_keys.register_kernel("cuda")
def _(keys: Tensor, share: Tensor) -> Tensor:
    from infini_model.model.kernels import triton_shift

    return triton_shift.shifted_keys_forward(keys, share)


@torch.library.custom_op("infini_model::shifted_keys_backward", mutates_args=())
def _backward(grad: Tensor, keys: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    dkeys, dshare = torch.empty_like(keys), torch.zeros_like(share)
    dkeys[:, :, -1] = grad[:, :, -1] * (1.0 - share[:, :, -1:])
    previous, current = _neighbours(keys)
    grads, next_grads = _neighbours(grad)
    dprevious, _ = _neighbours(dkeys)
    shares, next_shares = _neighbours(share.unsqueeze(-1))
    _, dshares = _neighbours(dshare.unsqueeze(-1))

    def differentiate(chunk: Chunk) -> None:
        torch.mul(grads[chunk], 1.0 - shares[chunk], out=dprevious[chunk])
        dprevious[chunk].addcmul_(next_grads[chunk], next_shares[chunk])
        difference = scratch("difference", keys, *current[chunk].shape)
        torch.sub(previous[chunk], current[chunk], out=difference)
        dshares[chunk] = torch.linalg.vecdot(next_grads[chunk], difference).unsqueeze(-1)

    for_each_chunk(differentiate, current, keys.size(1), _token_size(keys))
    return dkeys, dshare


@_backward.register_kernel("cuda")
def _(grad: Tensor, keys: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    from infini_model.model.kernels import triton_shift

    return triton_shift.shifted_keys_backward(grad, keys, share)


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [B, H, T, D] without its last and without its first token, each [T − 1, H, B, D]."""
    tokens = x.permute(2, 1, 0, 3)
    return tokens[:-1], tokens[1:]


def _token_size(keys: Tensor) -> int:
    """Bytes of one token's keys of one head."""
    return keys.size(0) * keys.size(3) * keys.element_size()


@shifted_keys.register_fake
def _(keys: Tensor, share: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(keys)


@_backward.register_fake
def _(grad: Tensor, keys: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(keys), torch.empty_like(share)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dkeys, dshare = _backward(grad, *ctx.saved_tensors)
    return dkeys, dshare


shifted_keys.register_autograd(_gradients, setup_context=_save)
