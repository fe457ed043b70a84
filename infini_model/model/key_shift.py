"""The key shift: each value is filed under its own token's key and under that of the token before.

An operator with a backward pass of its own, since what PyTorch derives goes over the whole
sequence a dozen times, and each result is as large as the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from infini_model.model.kernels.tiling import Piece, for_each_piece, scratch


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
    (before, now), (_, shifted) = _neighbours(keys), _neighbours(out)
    _, shares = _neighbours(share.unsqueeze(-1))

    def shift(piece: Piece) -> None:
        torch.lerp(now[piece], before[piece], shares[piece], out=shifted[piece])

    for_each_piece(shift, now, keys.size(1), _token_size(keys))
    return out


@torch.library.custom_op("infini_model::shifted_keys_backward", mutates_args=())
def _backward(grad: Tensor, keys: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    dkeys, dshare = torch.empty_like(keys), torch.zeros_like(share)
    dkeys[:, :, -1] = grad[:, :, -1] * (1.0 - share[:, :, -1:])
    (before, now), (own, later), (kept, _) = (_neighbours(x) for x in (keys, grad, dkeys))
    (shares, later_shares), (_, dshares) = (_neighbours(x.unsqueeze(-1)) for x in (share, dshare))

    def differentiate(piece: Piece) -> None:
        torch.mul(own[piece], 1.0 - shares[piece], out=kept[piece])
        kept[piece].addcmul_(later[piece], later_shares[piece])
        step = scratch("step", keys, *now[piece].shape)
        torch.sub(before[piece], now[piece], out=step)
        dshares[piece] = torch.linalg.vecdot(later[piece], step).unsqueeze(-1)

    for_each_piece(differentiate, now, keys.size(1), _token_size(keys))
    return dkeys, dshare


def _neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [B, H, T, D] as [T − 1, H, B, D], of the tokens that have one behind and before them."""
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
