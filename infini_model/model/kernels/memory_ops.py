"""The operators of the memory: read it and mix with local attention, and sum what segments write.

Both are custom operators with their own backward pass, opaque to `torch.compile`. On a CPU they
process the segments in chunks that fit the cache; on CUDA forward and backward are one Triton
kernel each, for heads up to 256 wide, or 128 in float32. σ = ELU + 1 and all sums are float32
(float64 for float64) for any input dtype.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infini_model.model.kernels.numerics import EMPTY_MASS, memory_dtype
from infini_model.model.kernels.operators import operator
from infini_model.model.kernels.tiling import (
    Chunk,
    chunk_rows,
    for_each_chunk,
    scratch,
    write_chunk,
)


@operator("launch", "gated_read_forward")
def gated_read(q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor) -> Tensor:
    """Read the memory and mix it with the local attention (arXiv 2404.07143, equations 7 and 10).

    Where the memory is empty the result is exactly `local`.

    Args:
        q: Queries without rotary embedding, [N, H, L, D].
        local: Local attention, of the shape and dtype of `q`.
        gate: [H], before the sigmoid.
        kv: Memory [N, H_kv, D, D]; query head h reads key-value head h // (H / H_kv).
        norm: Its normaliser [N, H_kv, D].

    Returns:
        [N, H, L, D] in the dtype of `local`.
    """
    heads, out = norm.size(1), torch.empty_like(local)

    def read(chunk: Chunk) -> None:
        features = _features(chunk_rows(q, chunk, heads))
        weights = _read_weights(features, gate, norm, chunk)
        local_rows = chunk_rows(local, chunk, heads)
        mixed = scratch("mixed", norm, *local_rows.shape)
        torch.mul(local_rows, 1.0 - weights.share, out=mixed)
        mixed.baddbmm_(features.mul_(weights.weight), kv[chunk].flatten(0, 1))
        write_chunk(out, chunk, heads, mixed)

    for_each_chunk(read, q, heads, _features_size(q, heads))
    return out


@operator("launch", "gated_read_backward")
def _gated_read_backward(
    grad: Tensor, q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = norm.size(1)
    dq, dlocal, dkv, dnorm = (torch.empty_like(x) for x in (q, local, kv, norm))
    dgate = norm.new_empty(q.size(0), heads, q.size(1) // heads)

    def differentiate(chunk: Chunk) -> None:
        features = _features(chunk_rows(q, chunk, heads))
        nonempty, mass, share, weight = _read_weights(features, gate, norm, chunk)
        grad_rows, local_rows = (chunk_rows(x, chunk, heads) for x in (grad, local))
        dfeatures = scratch("dfeatures", norm, *features.shape)
        torch.bmm(grad_rows, kv[chunk].flatten(0, 1).mT, out=dfeatures)
        dweight = torch.linalg.vecdot(features, dfeatures).unsqueeze(-1)
        dshare = dweight / mass - torch.linalg.vecdot(grad_rows, local_rows).unsqueeze(-1)
        dgate[chunk] = (dshare * nonempty).view(*dgate[chunk].shape, -1).sum(-1)

        dmass = -dweight * weight / mass
        weighted = torch.mul(grad_rows, weight, out=scratch("mixed", norm, *features.shape))
        dkv[chunk] = torch.bmm(features.mT, weighted).view_as(dkv[chunk])
        dnorm[chunk] = torch.bmm(dmass.mT, features).view_as(dnorm[chunk])
        dfeatures.mul_(weight).baddbmm_(dmass, norm[chunk].flatten(0, 1).unsqueeze(1))
        write_chunk(dq, chunk, heads, dfeatures.mul_(features.clamp_(max=1.0)))
        write_chunk(dlocal, chunk, heads, torch.mul(grad_rows, 1.0 - share, out=weighted))

    for_each_chunk(differentiate, q, heads, _features_size(q, heads))
    gate_share = gate.to(norm.dtype).sigmoid()
    dgate = dgate.sum(0).flatten() * gate_share * (1.0 - gate_share)
    return dq, dlocal, dgate.to(gate.dtype), dkv, dnorm


class _ReadWeights(NamedTuple):
    """How each row of a chunk reads the memory, [M, R, 1] each."""

    nonempty: Tensor  # whether the memory holds anything for it
    mass: Tensor  # σ(q)·z, 1 where the memory is empty
    share: Tensor  # of the memory in the result, 0 where the memory is empty
    weight: Tensor  # share / mass


def _read_weights(features: Tensor, gate: Tensor, norm: Tensor, chunk: Chunk) -> _ReadWeights:
    mass = torch.bmm(features, norm[chunk].flatten(0, 1).unsqueeze(-1))
    nonempty = mass > EMPTY_MASS
    mass = torch.where(nonempty, mass, 1.0)
    gate_share = gate.to(norm.dtype).sigmoid().view(norm.size(1), -1, 1)[chunk[1]]
    by_head = nonempty.view(-1, *gate_share.shape[:2], nonempty.size(1) // gate_share.size(1))
    share = (by_head * gate_share).view_as(mass)
    return _ReadWeights(nonempty, mass, share, share / mass)


@operator("launch", "key_value_sums_forward")
def key_value_sums(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What each segment writes (arXiv 2404.07143, equation 8): σ(K)ᵀV and Σσ(K).

    Args:
        keys: [N, H_kv, L, D].
        values: [N, H_kv, L, D].

    Returns:
        [N, H_kv, D, D] and [N, H_kv, D], float32 (float64 for float64).
    """
    heads, width, dtype = keys.size(1), keys.size(3), memory_dtype(keys.dtype)
    kv = torch.empty(len(keys), heads, width, width, dtype=dtype, device=keys.device)
    norm = torch.empty(kv.shape[:3], dtype=dtype, device=keys.device)

    def write(chunk: Chunk) -> None:
        features = _features(chunk_rows(keys, chunk, heads))
        kv[chunk] = torch.bmm(features.mT, chunk_rows(values, chunk, heads)).view_as(kv[chunk])
        norm[chunk] = features.sum(dim=1).view_as(norm[chunk])

    for_each_chunk(write, keys, heads, _features_size(keys, heads))
    return kv, norm


@operator("launch", "key_value_sums_backward")
def _key_value_sums_backward(
    dkv: Tensor, dnorm: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    heads, dkeys, dvalues = keys.size(1), torch.empty_like(keys), torch.empty_like(values)

    def differentiate(chunk: Chunk) -> None:
        features = _features(chunk_rows(keys, chunk, heads))
        chunk_dkv = dkv[chunk].flatten(0, 1)
        chunk_dnorm = dnorm[chunk].flatten(0, 1).unsqueeze(1)
        product = scratch("mixed", dkv, *features.shape)
        write_chunk(dvalues, chunk, heads, torch.bmm(features, chunk_dkv, out=product))
        value_rows = chunk_rows(values, chunk, heads)
        dfeatures = torch.baddbmm(chunk_dnorm, value_rows, chunk_dkv.mT, out=product)
        write_chunk(dkeys, chunk, heads, dfeatures.mul_(features.clamp_(max=1.0)))

    for_each_chunk(differentiate, keys, heads, _features_size(keys, heads))
    return dkeys, dvalues


def _features_size(x: Tensor, heads: int) -> int:
    """Bytes of the features of `x` [N, heads · G, L, D] for one head of one segment."""
    return math.prod(x.shape[1:]) // heads * memory_dtype(x.dtype).itemsize


def _features(x: Tensor) -> Tensor:
    """σ(x) of x [M, R, D], as in `infini_model.model.memory.feature_map`, in scratch memory."""
    features = torch.clamp(x, max=0.0, out=scratch("features", x, *x.shape)).exp_()
    return features.add_(torch.clamp(x, min=0.0, out=scratch("mixed", x, *x.shape)))


@gated_read.register_fake
def _(q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(local)


@_gated_read_backward.register_fake
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG001
    return tuple(torch.empty_like(x) for x in inputs)


@key_value_sums.register_fake
def _(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    dtype = memory_dtype(keys.dtype)
    norm = keys.new_empty(*keys.shape[:2], keys.size(3), dtype=dtype)
    return norm.new_empty(*norm.shape, keys.size(3)), norm


@_key_value_sums_backward.register_fake
def _(dkv: Tensor, dnorm: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(keys), torch.empty_like(values)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: object) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _read_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(_gated_read_backward(grad, *ctx.saved_tensors))


def _sums_gradients(ctx: Any, dkv: Tensor, dnorm: Tensor) -> tuple[Tensor, ...]:
    return tuple(_key_value_sums_backward(dkv, dnorm, *ctx.saved_tensors))


gated_read.register_autograd(_read_gradients, setup_context=_save)
key_value_sums.register_autograd(_sums_gradients, setup_context=_save)
