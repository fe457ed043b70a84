"""Causal attention on a CPU that skips the tiles above the diagonal.

PyTorch's CPU kernel computes the scores of up to 512 keys and masks the later ones. Here a tile of
query rows meets only the keys up to its own last row: 56 % of the products at 512 tokens. The
scores of a tile and the rotated queries and keys stay in the cache; the backward pass recomputes
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infini_model.model.kernels.tiling import (
    Chunk,
    for_each_chunk,
    read_chunk,
    scratch,
    write_chunk,
)
from infini_model.model.rotary import Rope

# Rows per tile. Half of each diagonal tile is wasted, but products of smaller tiles are slower.
TILE = 64


@torch.library.custom_op("infini_model::tiled_attention", mutates_args=(), device_types="cpu")
def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> Tensor:
    """Causal softmax attention (arXiv 2404.07143, equations 2 and 3).

    Args:
        q: Queries [N, H, L, D], float32 or float64, on a CPU.
        k: Keys [N, H_kv, L, D]; query head h reads key-value head h // (H / H_kv).
        v: Values [N, H_kv, L, D].
        cos: [L, D], of the rotary embedding of queries and keys, as in
            `infini_model.model.rotary.rotate`; None for no embedding. It gets no gradient.
        sin: Like `cos`.

    Returns:
        [N, H, L, D].
    """
    heads, future, out = k.size(1), _future(q), torch.empty_like(q)
    rope = _rope(q, cos, sin)

    def attend(chunk: Chunk) -> None:
        queries, keys, values = _read(chunk, q, k, v, rope)
        mixed = scratch("mixed", q, *queries.shape)
        for rows in _tiles(q):
            row_queries, seen_keys, seen_values = _tile(rows, queries, keys, values)
            weights = _weights(row_queries, seen_keys, future)
            product = scratch("product", q, *row_queries.shape)
            torch.bmm(weights, seen_values, out=product)
            mixed[:, :, rows] = product.view_as(mixed[:, :, rows])
        write_chunk(out, chunk, heads, mixed)

    for_each_chunk(attend, q, heads, _scores_size(q, heads))
    return out


@torch.library.custom_op(
    "infini_model::tiled_attention_backward", mutates_args=(), device_types="cpu"
)
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    heads, future, scale = k.size(1), _future(q), q.size(3) ** -0.5
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    rope, inverse = _rope(q, cos, sin), _rope(q, cos, sin, inverse=True)

    def differentiate(chunk: Chunk) -> None:
        queries, keys, values = _read(chunk, q, k, v, rope)
        grads = _rotated("grads", read_chunk(grad, chunk, heads), None)
        dqueries = scratch("dqueries", q, *queries.shape)
        dkeys, dvalues = (scratch(name, k, *keys.shape).zero_() for name in ("dkeys", "dvalues"))
        for rows in _tiles(q):
            row_queries, seen_keys, seen_values = _tile(rows, queries, keys, values)
            row_grads, seen_dkeys, seen_dvalues = _tile(rows, grads, dkeys, dvalues)
            weights = _weights(row_queries, seen_keys, future)
            seen_dvalues.baddbmm_(weights.mT, row_grads)
            dweights = scratch("dweights", q, *weights.shape)
            torch.bmm(row_grads, seen_values.mT, out=dweights)
            torch.ops.aten._softmax_backward_data.out(
                dweights, weights, -1, q.dtype, grad_input=dweights
            )
            seen_dkeys.baddbmm_(dweights.mT, row_queries, alpha=scale)
            product = scratch("product", q, *row_queries.shape)
            torch.bmm(dweights, seen_keys, out=product)
            dqueries[:, :, rows] = product.mul_(scale).view_as(dqueries[:, :, rows])
        write_chunk(dq, chunk, heads, _rotated("queries", dqueries, inverse))
        write_chunk(dk, chunk, heads, _rotated("keys", dkeys, inverse))
        write_chunk(dv, chunk, heads, dvalues)

    for_each_chunk(differentiate, q, heads, _scores_size(q, heads))
    return dq, dk, dv


def _rope(
    like: Tensor, cos: Tensor | None, sin: Tensor | None, *, inverse: bool = False
) -> Rope | None:
    """The factors [L, D] of a row and of its swapped halves in the rotation, or in its inverse."""
    if cos is None or sin is None:
        return None
    half = sin.size(1) // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
    return cos.to(like.dtype), (signed.roll(half, dims=1) if inverse else signed).to(like.dtype)


def _rotated(name: str, x: Tensor, rope: Rope | None) -> Tensor:
    """A copy of `x` [M, G, L, D] rotated by `rope`, in the scratch memory `name`."""
    out = scratch(name, x, *x.shape)
    if rope is None:
        return out.copy_(x)
    factor, crossed = rope
    torch.mul(x, factor, out=out)
    half = x.size(3) // 2
    out[..., :half].addcmul_(x[..., half:], crossed[:, :half])
    out[..., half:].addcmul_(x[..., :half], crossed[:, half:])
    return out


def _read(chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> tuple[Tensor, ...]:
    """A chunk of the queries [M, G, L, D], keys and values [M, 1, L, D], each contiguous."""
    heads = k.size(1)
    return (
        _rotated("queries", read_chunk(q, chunk, heads), rope),
        _rotated("keys", read_chunk(k, chunk, heads), rope),
        _rotated("values", read_chunk(v, chunk, heads), None),
    )


def _scores_size(q: Tensor, heads: int) -> int:
    """Bytes of the scores of the largest tile, for one key-value head of one segment."""
    return q.size(1) // heads * TILE * q.size(2) * q.element_size()


def _tiles(q: Tensor) -> Iterator[slice]:
    for start in range(0, q.size(2), TILE):
        yield slice(start, min(start + TILE, q.size(2)))


def _tile(
    rows: slice, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of queries [M, G, L, D] as [M, G · R, D]; keys and values up to them, [M, K, D]."""
    seen = slice(rows.stop)
    return queries[:, :, rows].flatten(1, 2), keys[:, 0, seen], values[:, 0, seen]


def _future(q: Tensor) -> Tensor:
    """The causal mask inside a diagonal tile, [TILE, TILE]: −∞ above the diagonal, else 0."""
    return torch.full((TILE, TILE), -torch.inf, dtype=q.dtype).triu_(1)


def _weights(queries: Tensor, keys: Tensor, future: Tensor) -> Tensor:
    """Softmax weights [M, G · R, K] of queries [M, G · R, D] over keys [M, K, D].

    The queries are those of the last R keys.
    """
    scores = scratch("scores", queries, *queries.shape[:2], keys.size(1))
    torch.baddbmm(scores, queries, keys.mT, beta=0.0, alpha=queries.size(2) ** -0.5, out=scores)
    rows = (keys.size(1) - 1) % TILE + 1
    diagonal = scores.view(len(scores), -1, rows, keys.size(1))[..., -rows:]
    diagonal += future[:rows, :rows]
    return torch.softmax(scores, dim=-1, out=scores)


@tiled_attention.register_fake
def _(q: Tensor, *others: Tensor | None) -> Tensor:  # noqa: ARG001
    return torch.empty_like(q)


@_backward.register_fake
def _(grad: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(torch.empty_like(x) for x in inputs[:3] if x is not None)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors), None, None)


tiled_attention.register_autograd(_gradients, setup_context=_save)
