"""Cross entropy of a language model whose logits are never held whole.

The loss is the end of the forward pass: its gradients are known there but for one factor, the
gradient of the loss itself. So each chunk of rows gives its share of them while its logits are
there, and the backward pass has only to multiply. Nothing is computed twice. Liger Kernel (arXiv
2410.10989) does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits held at once: 2^26 float32 are 256 MiB. Each chunk is added to the gradient of the whole
# weight, which is cheap beside the products where a chunk has 500 rows or more.
LOGITS_AT_ONCE = 1 << 26

IGNORED = -100


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all targets, with gradients for `hidden` and `weight`.

    Args:
        hidden: [N, H], of a floating-point dtype.
        weight: Of the output layer, [V, H]; the logits are hidden · weightᵀ, in the dtype that
            autocast gives them.
        targets: [N] int64; -100 is left out.

    Returns:
        [], float32 (float64 for float64); the gradients have the dtypes of `hidden` and `weight`.

    Raises:
        RuntimeError, IndexError: A target is outside the vocabulary.
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        return token_losses(hidden, weight, targets).sum()
    dtype = functional.linear(hidden[:0], weight[:0]).dtype
    total: Tensor = _loss_and_gradients(hidden, weight, targets, dtype, LOGITS_AT_ONCE)[0]
    return total


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, [N], 0 where left out; else as `summed_loss`.

    Gradients reach `hidden` and `weight`, but then all logits are kept for them.
    """
    count = _chunk_count(hidden, weight, LOGITS_AT_ONCE)
    pieces = zip(hidden.chunk(count), targets.chunk(count), strict=True)
    exact = _exact(hidden)
    losses = [
        functional.cross_entropy(
            functional.linear(rows, weight).to(exact),
            wanted,
            ignore_index=IGNORED,
            reduction="none",
        )
        for rows, wanted in pieces
    ]
    return torch.cat(losses)


@torch.library.custom_op("infini_model::loss_and_gradients", mutates_args=())
def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, logits_at_once: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses and its gradients by `hidden` and `weight`; products in `dtype`."""
    exact, count = _exact(hidden), _chunk_count(hidden, weight, logits_at_once)
    table, dhidden = weight.to(dtype), torch.empty_like(hidden)
    dweight = torch.zeros_like(weight, dtype=exact)
    losses = torch.empty_like(targets, dtype=exact)
    pieces = (x.chunk(count) for x in (hidden, targets, losses, dhidden))
    room = table.new_empty(-(-len(hidden) // count), len(table))
    for rows, wanted, loss, drows in zip(*pieces, strict=True):
        left_out = wanted == IGNORED
        index = wanted.masked_fill(left_out, 0).unsqueeze(1)
        logits = torch.mm(rows.to(dtype), table.t(), out=room[: len(rows)]).to(exact)
        log_shares = torch.log_softmax(logits, dim=1, out=logits)
        hit = log_shares.gather(1, index)
        loss.copy_(hit.squeeze(1).neg().masked_fill_(left_out, 0.0))

        # Softmax less one at the target; rows left out are masked in what is narrow.
        dlogits = log_shares.exp_().scatter_(1, index, hit.expm1()).to(dtype)
        masked = left_out.unsqueeze(1)
        drows.copy_(torch.mm(dlogits, table).masked_fill_(masked, 0.0))
        counted = rows.to(dtype).masked_fill(masked, 0.0)
        if dtype == exact:
            dweight.addmm_(dlogits.t(), counted)
        else:
            dweight += torch.mm(dlogits.t(), counted)
    return losses.sum(), dhidden, dweight.to(weight.dtype)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunk_count(hidden: Tensor, weight: Tensor, logits_at_once: int) -> int:
    """Into how many chunks the rows fall, as equal as can be and no longer than allowed."""
    longest = max(1, logits_at_once // len(weight))
    return max(1, -(-len(hidden) // longest))


@_loss_and_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    logits_at_once: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden.new_empty((), dtype=_exact(hidden))
    return total, torch.empty_like(hidden), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scaled(ctx: Any, grad: Tensor, *again: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in again):
        raise RuntimeError("the loss can be differentiated once, not twice")
    dhidden, dweight = ctx.saved_tensors
    return dhidden * grad, dweight * grad, None, None, None


_loss_and_gradients.register_autograd(_scaled, setup_context=_save)
