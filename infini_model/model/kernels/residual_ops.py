"""The operators of the residual memory: read it onto local attention, and sum what is written.

The features of a row x of width D are φ(x) = [softmax(c x), softmax(−c x)], of width 2 D (Hedgehog,
arXiv 2402.04347), where c is `SHARPNESS`. Each is bounded by 1 and together they sum to 2, so
nothing needs a normaliser. The operators are made as those of
`infini_model.model.kernels.memory_ops` are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from infini_model.model.kernels.numerics import READ_EPSILON, SHARPNESS, memory_dtype
from infini_model.model.kernels.operators import operator
from infini_model.model.kernels.tiling import (
    Chunk,
    chunk_rows,
    for_each_chunk,
    scratch,
    write_chunk,
)


@operator("residual", "residual_read_forward")
def residual_read(q: Tensor, local: Tensor, weight: Tensor, kv: Tensor) -> Tensor:
    """Read the memory, and add what it returns to the local attention: local + w ⊙ RMSNorm(φ(q) S).

    Where the memory is empty or `weight` is 0, the result is exactly `local`.

    Args:
        q: Queries without rotary embedding, [N, H, L, D].
        local: Local attention, of the shape and dtype of `q`.
        weight: w, [H, D].
        kv: S, [N, H_kv, 2 D, D]; query head h reads key-value head h // (H / H_kv).

    Returns:
        [N, H, L, D] in the dtype of `local`.
    """
    heads, out = kv.size(1), torch.empty_like(local)
    weights = _weights(weight, kv)

    def read(chunk: Chunk) -> None:
        normed, _ = _normed(_features(chunk_rows(q, chunk, heads)), kv, chunk)
        _by_head(normed, weights, chunk).mul_(weights[chunk[1]])
        write_chunk(out, chunk, heads, normed.add_(chunk_rows(local, chunk, heads)))

    for_each_chunk(read, q, heads, _features_size(q, heads))
    return out


@operator("residual", "residual_read_backward")
def _residual_read_backward(
    grad: Tensor, q: Tensor, weight: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = kv.size(1)
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    weights = _weights(weight, kv)
    dweight = kv.new_empty(q.size(0), *weights.shape)

    def differentiate(chunk: Chunk) -> None:
        features = _features(chunk_rows(q, chunk, heads))
        normed, inverse = _normed(features, kv, chunk)
        grad_rows = chunk_rows(grad, chunk, heads)
        product = torch.mul(grad_rows, normed, out=scratch("product", kv, *normed.shape))
        dweight[chunk] = _by_head(product, weights, chunk).sum(-2, keepdim=True)
        _by_head(product, weights, chunk).mul_(weights[chunk[1]])
        slope = product.mean(-1, keepdim=True)
        # d of what was read: (w ⊙ d − y · mean(w ⊙ d ⊙ y)) / rms, in place of y.
        dread = torch.mul(_by_head(grad_rows, weights, chunk), weights[chunk[1]]).view_as(normed)
        dread.addcmul_(normed, slope, value=-1.0).mul_(inverse)
        dkv[chunk] = torch.bmm(features.mT, dread).view_as(dkv[chunk])
        dfeatures = scratch("dfeatures", kv, *features.shape)
        torch.bmm(dread, kv[chunk].flatten(0, 1).mT, out=dfeatures)
        write_chunk(dq, chunk, heads, _through_features(features, dfeatures))

    for_each_chunk(differentiate, q, heads, _features_size(q, heads))
    return dq, dweight.sum(0).view_as(weight).to(weight.dtype), dkv


@operator("residual", "residual_sums_forward")
def residual_sums(keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """What each segment writes: Σ β φ(k)ᵀ v.

    Args:
        keys: [N, H_kv, L, D].
        values: Of the shape and dtype of `keys`.
        scale: β, [N, H_kv, L], in the memory's dtype.

    Returns:
        [N, H_kv, 2 D, D], in the memory's dtype.
    """
    heads, width = keys.size(1), keys.size(3)
    kv = scale.new_empty(*keys.shape[:2], 2 * width, width)

    def write(chunk: Chunk) -> None:
        features = _features(chunk_rows(keys, chunk, heads))
        features.mul_(scale[chunk].flatten(0, 1).unsqueeze(-1))
        kv[chunk] = torch.bmm(features.mT, chunk_rows(values, chunk, heads)).view_as(kv[chunk])

    for_each_chunk(write, keys, heads, _features_size(keys, heads))
    return kv


@operator("residual", "residual_sums_backward")
def _residual_sums_backward(
    dkv: Tensor, keys: Tensor, values: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = keys.size(1)
    dkeys, dvalues, dscale = (torch.empty_like(x) for x in (keys, values, scale))

    def differentiate(chunk: Chunk) -> None:
        features = _features(chunk_rows(keys, chunk, heads))
        chunk_dkv, value_rows = dkv[chunk].flatten(0, 1), chunk_rows(values, chunk, heads)
        factors = scale[chunk].flatten(0, 1).unsqueeze(-1)
        read = torch.bmm(features, chunk_dkv, out=scratch("read", dkv, *value_rows.shape))
        dscale[chunk] = torch.linalg.vecdot(value_rows, read).view_as(dscale[chunk])
        write_chunk(dvalues, chunk, heads, read.mul_(factors))
        dfeatures = scratch("dfeatures", dkv, *features.shape)
        torch.bmm(value_rows, chunk_dkv.mT, out=dfeatures).mul_(factors)
        write_chunk(dkeys, chunk, heads, _through_features(features, dfeatures))

    for_each_chunk(differentiate, keys, heads, _features_size(keys, heads))
    return dkeys, dvalues, dscale


def _features_size(x: Tensor, heads: int) -> int:
    """Bytes of the features of `x` [N, heads · G, L, D] for one head of one segment."""
    return 2 * math.prod(x.shape[1:]) // heads * memory_dtype(x.dtype).itemsize


def _features(x: Tensor) -> Tensor:
    """φ of x [M, R, D], [M, R, 2 D] in scratch memory."""
    rows, width = x.shape[:2], x.size(2)
    both = scratch("both", x, *rows, 2, width)
    both[:, :, 0].copy_(x).mul_(SHARPNESS)
    torch.neg(both[:, :, 0], out=both[:, :, 1])
    features = torch.softmax(both, -1, out=scratch("features", x, *rows, 2, width))
    return features.flatten(2)


def _through_features(features: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x [M, R, D] from that of its features, which is overwritten."""
    product = grad.mul_(features).view(*grad.shape[:2], 2, -1)
    total = product.sum(-1, keepdim=True)
    product.addcmul_(features.view_as(product), total, value=-1.0)
    dx: Tensor = product[:, :, 0].sub_(product[:, :, 1]).mul_(SHARPNESS)
    return dx


def _normed(features: Tensor, kv: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """RMSNorm(φ S), [M, R, D] in scratch memory, and the inverse of its divisor, [M, R, 1]."""
    rows, width = features.shape[:2], kv.size(3)
    read = scratch("read", kv, *rows, width)
    torch.bmm(features, kv[chunk].flatten(0, 1), out=read)
    inverse = torch.linalg.vecdot(read, read).div_(width).add_(READ_EPSILON).rsqrt_().unsqueeze(-1)
    return read.mul_(inverse), inverse


def _weights(weight: Tensor, kv: Tensor) -> Tensor:
    """w [H, D] beside the memories that its heads read, [H_kv, H / H_kv, 1, D]."""
    return weight.to(kv.dtype).view(kv.size(1), -1, 1, kv.size(3))


def _by_head(rows: Tensor, weights: Tensor, chunk: Chunk) -> Tensor:
    """A chunk of rows [M, R, D] as [n, h, G, L, D], to be multiplied by those of `_weights`."""
    heads, group = weights[chunk[1]].shape[:2]
    return rows.view(-1, heads, group, rows.size(1) // group, rows.size(2))


@residual_read.register_fake
def _(q: Tensor, local: Tensor, weight: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(local)


@_residual_read_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(torch.empty_like(x) for x in inputs)


@residual_sums.register_fake
def _(keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001
    return scale.new_empty(*keys.shape[:2], 2 * keys.size(3), keys.size(3))


@_residual_sums_backward.register_fake
def _(dkv: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(torch.empty_like(x) for x in inputs)


def _save_read(ctx: Any, inputs: tuple[Tensor, ...], output: object) -> None:  # noqa: ARG001
    q, _, weight, kv = inputs
    ctx.save_for_backward(q, weight, kv)


def _read_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    dq, dweight, dkv = _residual_read_backward(grad, *ctx.saved_tensors)
    return dq, grad, dweight, dkv


def _save_sums(ctx: Any, inputs: tuple[Tensor, ...], output: object) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _sums_gradients(ctx: Any, dkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(_residual_sums_backward(dkv, *ctx.saved_tensors))


residual_read.register_autograd(_read_gradients, setup_context=_save_read)
residual_sums.register_autograd(_sums_gradients, setup_context=_save_sums)
