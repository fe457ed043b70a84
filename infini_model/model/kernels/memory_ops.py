"""The two passes over all tokens that the memory costs: read it and mix, and sum what is written.

Both are operators with a backward pass of their own, of which `torch.compile` sees the outside. On
a CPU they go through the segments in pieces that fit the cache; on CUDA each is one Triton kernel
each way. σ = ELU + 1 and all sums are float32 (float64 for float64) whatever comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from infini_model.model.kernels.numerics import NOTHING_FOUND, memory_dtype
from infini_model.model.kernels.tiling import Piece, for_each_piece, put, scratch, take

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def _operator(kernel: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """The decorated definition as an operator, which `kernel` of `triton` is on CUDA.

    float64 asks for more digits than those kernels have, and gets the definition there, too.
    """

    def define(definition: Callable[..., Any]) -> CustomOpDef:
        name = f"infini_model::{definition.__name__.removeprefix('_')}"
        operator = torch.library.custom_op(name, definition, mutates_args=())

        @operator.register_kernel("cuda")
        def _(*inputs: Tensor) -> Any:
            if inputs[0].dtype == torch.float64:
                return definition(*inputs)
            from infini_model.model.kernels import triton

            return getattr(triton, kernel)(*inputs)

        return operator

    return define


@_operator("gated_read_forward")
def gated_read(q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor) -> Tensor:
    """Read the memory and mix it with the local attention (arXiv 2404.07143, equations 7 and 10).

    Where the memory is empty the result is `local` exactly.

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

    def read(piece: Piece) -> None:
        features = _features(_rows(q, piece, heads))
        by = _reading(features, gate, norm, piece)
        near = _rows(local, piece, heads)
        mixed = torch.mul(near, 1.0 - by.share, out=scratch("mixed", norm, *near.shape))
        mixed.baddbmm_(features.mul_(by.weight), kv[piece].flatten(0, 1))
        put(out, piece, heads, mixed)

    for_each_piece(read, q, heads, _features_size(q, heads))
    return out


@_operator("gated_read_backward")
def _gated_read_backward(
    grad: Tensor, q: Tensor, local: Tensor, gate: Tensor, kv: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = norm.size(1)
    dq, dlocal, dkv, dnorm = (torch.empty_like(x) for x in (q, local, kv, norm))
    dgate = norm.new_empty(q.size(0), heads, q.size(1) // heads)

    def differentiate(piece: Piece) -> None:
        features = _features(_rows(q, piece, heads))
        by = _reading(features, gate, norm, piece)
        incoming, near = (_rows(x, piece, heads) for x in (grad, local))
        dfeatures = scratch("dfeatures", norm, *features.shape)
        torch.bmm(incoming, kv[piece].flatten(0, 1).mT, out=dfeatures)
        dweight = torch.linalg.vecdot(features, dfeatures).unsqueeze(-1)
        dshare = dweight / by.total - torch.linalg.vecdot(incoming, near).unsqueeze(-1)
        dgate[piece] = (dshare * by.hit).view(*dgate[piece].shape, -1).sum(-1)

        dtotal = -dweight * by.weight / by.total
        weighted = torch.mul(incoming, by.weight, out=scratch("mixed", norm, *features.shape))
        dkv[piece] = torch.bmm(features.mT, weighted).view_as(dkv[piece])
        dnorm[piece] = torch.bmm(dtotal.mT, features).view_as(dnorm[piece])
        dfeatures.mul_(by.weight).baddbmm_(dtotal, norm[piece].flatten(0, 1).unsqueeze(1))
        put(dq, piece, heads, dfeatures.mul_(features.clamp_(max=1.0)))
        put(dlocal, piece, heads, torch.mul(incoming, 1.0 - by.share, out=weighted))

    for_each_piece(differentiate, q, heads, _features_size(q, heads))
    open_share = gate.to(norm.dtype).sigmoid()
    dgate = dgate.sum(0).flatten() * open_share * (1.0 - open_share)
    return dq, dlocal, dgate.to(gate.dtype), dkv, dnorm


class _Reading(NamedTuple):
    """What each row of a piece reads by, [M, R, 1] each."""

    hit: Tensor  # whether it finds anything
    total: Tensor  # its features times the normaliser, 1 where nothing is found
    share: Tensor  # of the memory in the result, 0 where nothing is found
    weight: Tensor  # share / total


def _reading(features: Tensor, gate: Tensor, norm: Tensor, piece: Piece) -> _Reading:
    total = torch.bmm(features, norm[piece].flatten(0, 1).unsqueeze(-1))
    hit = total > NOTHING_FOUND
    total = torch.where(hit, total, 1.0)
    open_share = gate.to(norm.dtype).sigmoid().view(norm.size(1), -1, 1)[piece[1]]
    by_head = hit.view(-1, *open_share.shape[:2], hit.size(1) // open_share.size(1))
    share = (by_head * open_share).view_as(total)
    return _Reading(hit, total, share, share / total)


@_operator("key_value_sums_forward")
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

    def write(piece: Piece) -> None:
        features = _features(_rows(keys, piece, heads))
        kv[piece] = torch.bmm(features.mT, _rows(values, piece, heads)).view_as(kv[piece])
        norm[piece] = features.sum(dim=1).view_as(norm[piece])

    for_each_piece(write, keys, heads, _features_size(keys, heads))
    return kv, norm


@_operator("key_value_sums_backward")
def _key_value_sums_backward(
    dkv: Tensor, dnorm: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    heads, dkeys, dvalues = keys.size(1), torch.empty_like(keys), torch.empty_like(values)

    def differentiate(piece: Piece) -> None:
        features = _features(_rows(keys, piece, heads))
        by_pair, by_key = dkv[piece].flatten(0, 1), dnorm[piece].flatten(0, 1).unsqueeze(1)
        product = scratch("mixed", dkv, *features.shape)
        put(dvalues, piece, heads, torch.bmm(features, by_pair, out=product))
        filed = _rows(values, piece, heads)
        dfeatures = torch.baddbmm(by_key, filed, by_pair.mT, out=product)
        put(dkeys, piece, heads, dfeatures.mul_(features.clamp_(max=1.0)))

    for_each_piece(differentiate, keys, heads, _features_size(keys, heads))
    return dkeys, dvalues


def _features_size(x: Tensor, heads: int) -> int:
    """Bytes of the features of `x` [N, heads · G, L, D] for one head of one segment."""
    return math.prod(x.shape[1:]) // heads * memory_dtype(x.dtype).itemsize


def _rows(x: Tensor, piece: Piece, heads: int) -> Tensor:
    """A piece of `x` [N, heads · G, L, D] as [M, G · L, D], one list of rows a memory, exactly."""
    return take(x, piece, heads).flatten(1, 2).to(memory_dtype(x.dtype))


def _features(x: Tensor) -> Tensor:
    """σ(x) of x [M, R, D], as `infini_model.model.memory.feature_map` has it."""
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
