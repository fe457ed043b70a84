"""Cross entropy of a language model, chunk by chunk, so that all logits never exist at once.

The loss ends the forward pass, so its gradients are known there up to one factor, the gradient of
the loss itself. Each chunk of rows computes its gradients while its logits exist, and the backward
pass only multiplies them by that factor. Nothing is computed twice. Liger Kernel (arXiv 2410.10989)
does the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits per chunk: 2^26 float32 are 256 MiB. Each chunk adds to the gradient of the whole weight,
# which is cheap compared to its matrix products if it has 500 rows or more.
LOGITS_AT_ONCE = 1 << 26

IGNORED = -100


def summed_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """The sum of the losses of all targets, with gradients for `hidden` and `weight`.

    Args:
        hidden: [N, H], of a floating-point dtype.
        weight: Of the output layer, [V, H]; the logits are hidden · weightᵀ, in the dtype that
            autocast gives them.
        targets: [N] int64; -100 is ignored.
        logits_at_once: Size of the largest chunk of logits, but at least one row.

    Returns:
        [], float32 (float64 for float64); the gradients have the dtypes of `hidden` and `weight`.

    Raises:
        RuntimeError, IndexError: A target is outside the vocabulary.
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        return token_losses(hidden, weight, targets, logits_at_once=logits_at_once).sum()
    dtype = functional.linear(hidden[:0], weight[:0]).dtype
    total: Tensor = _loss_and_gradients(hidden, weight, targets, dtype, logits_at_once)[0]
    return total


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, logits_at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """The loss of each target, [N], 0 where ignored; arguments are those of `summed_loss`.

    Gradients flow to `hidden` and `weight`, but then autograd keeps the logits of all chunks.
    """
    count = _chunk_count(hidden, weight, logits_at_once)
    chunks = zip(hidden.chunk(count), targets.chunk(count), strict=True)
    exact = _exact(hidden)
    losses = [
        functional.cross_entropy(
            functional.linear(rows, weight).to(exact),
            row_targets,
            ignore_index=IGNORED,
            reduction="none",
        )
        for rows, row_targets in chunks
    ]
    return torch.cat(losses)


@torch.library.custom_op("infini_model::loss_and_gradients", mutates_args=())
def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, logits_at_once: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and its gradients for `hidden` and `weight`; products in `dtype`."""
    exact, count = _exact(hidden), _chunk_count(hidden, weight, logits_at_once)
    table, dhidden = weight.to(dtype), torch.empty_like(hidden)
    dweight = torch.zeros_like(weight, dtype=exact)
    losses = torch.empty_like(targets, dtype=exact)
    chunks = (x.chunk(count) for x in (hidden, targets, losses, dhidden))
    buffer = table.new_empty(-(-len(hidden) // count), len(table))
    for rows, row_targets, loss, drows in zip(*chunks, strict=True):
        ignored = row_targets == IGNORED
        index = row_targets.masked_fill(ignored, 0).unsqueeze(1)
        logits = torch.mm(rows.to(dtype), table.t(), out=buffer[: len(rows)]).to(exact)
        log_probs = torch.log_softmax(logits, dim=1, out=logits)
        target_log_probs = log_probs.gather(1, index)
        loss.copy_(target_log_probs.squeeze(1).neg().masked_fill_(ignored, 0.0))

        # Softmax minus one at the target. Ignored rows are masked in tensors of width H, which is
        # cheaper than in the logits.
        dlogits = log_probs.exp_().scatter_(1, index, target_log_probs.expm1()).to(dtype)
        mask = ignored.unsqueeze(1)
        drows.copy_(torch.mm(dlogits, table).masked_fill_(mask, 0.0))
        kept_rows = rows.to(dtype).masked_fill(mask, 0.0)
        if dtype == exact:
            dweight.addmm_(dlogits.t(), kept_rows)
        else:
            dweight += torch.mm(dlogits.t(), kept_rows)
    return losses.sum(), dhidden, dweight.to(weight.dtype)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunk_count(hidden: Tensor, weight: Tensor, logits_at_once: int) -> int:
    """The number of chunks, of about equal size, that the rows are split into."""
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


def _scale(ctx: Any, grad: Tensor, *second_order: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(x is not None for x in second_order):
        raise RuntimeError("the loss can be differentiated once, not twice")
    dhidden, dweight = ctx.saved_tensors
    return dhidden * grad, dweight * grad, None, None, None


_loss_and_gradients.register_autograd(_scale, setup_context=_save)
