"""The key shift: a value is written under a mix of its own token's key and the previous token's.

A custom operator with its own backward pass: the one that autograd derives makes a dozen passes
over the sequence, each with a result as large as the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infini_model.model.kernels.tiling import Chunk, for_each_chunk, scratch


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
