"""Cross entropy of a language model, chunk by chunk, so that all logits never exist at once.

The loss ends the forward pass, so its gradients are known there up to one factor, the gradient of
the loss itself. Each chunk of rows computes its gradients while its logits exist, and the backward
pass only multiplies them by that factor. Nothing is computed twice. Liger Kernel (arXiv 2410.10989)
does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from infini_model.model.precision import as_operand

# Logits per chunk, but at least one row: 2^26 float32 are 256 MiB.
LOGITS_AT_ONCE = 1 << 26
# Rows of a chunk come in multiples of this, for the tiles of the matrix products.
TILE = 128
# The gradient of the weight in 16 bits is added up in parts of this many numbers: 32 MiB.
PRODUCTS_AT_ONCE = 1 << 24

# Rows whose gradient of the weight may be summed in fp16, which ends at 65,504: each may add
# several units to a number of it.
FP16_ROWS = 8192

IGNORED = -100


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    row_weights: Tensor | None = None,
    excluded: int | None = None,
) -> Tensor:
    """The weighted sum of the losses of all targets, with gradients for `hidden` and `weight`.

    Args:
        hidden: [N, H], of a floating-point dtype.
        weight: Of the output layer, [V, H]; the logits are hidden · weightᵀ, in the dtype that
            autocast gives them, or that of `hidden`.
        targets: [N] int64; -100 is ignored.
        row_weights: [N] float32, the factor of each loss; None is 1.
        excluded: A token that has no probability and is no target, such as a mask token.

    The result is float32 (float64 for float64); the gradients have the dtypes of `hidden` and
    `weight`. Raises `RuntimeError` or `IndexError` if a target is outside the vocabulary.
    """
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        losses = token_losses(hidden, weight, targets, excluded=excluded)
        return losses.sum() if row_weights is None else losses @ row_weights.to(losses.dtype)
    dtype = functional.linear(hidden[:0], as_operand(weight[:0], hidden)).dtype
    # Each chunk reads and writes the gradient of the whole weight: as many logits as that has
    # numbers, so that it costs little beside their products.
    rows = _rows_at_once(len(hidden), len(weight), max(LOGITS_AT_ONCE, weight.numel()))
    if dtype == torch.float16:
        rows = min(rows, FP16_ROWS)
    inputs = hidden, weight, targets, row_weights, excluded, dtype, rows
    total: Tensor = _LossAndGradients.apply(*inputs)  # type: ignore[no-untyped-call]
    return total


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    row_weights: Tensor | None = None,
    excluded: int | None = None,
) -> Tensor:
    """The weighted loss of each target, [N], 0 where ignored; as `fused_linear_cross_entropy`.

    Gradients flow to `hidden` and `weight`, but then autograd keeps the logits of all chunks.
    """
    at_once = _rows_at_once(len(hidden), len(weight), LOGITS_AT_ONCE)
    chunks = zip(torch.split(hidden, at_once), torch.split(targets, at_once), strict=True)
    exact, weight = _exact(hidden), as_operand(weight, hidden)
    parts = [
        functional.cross_entropy(
            _without(functional.linear(rows, weight).to(exact), excluded),
            row_targets,
            ignore_index=IGNORED,
            reduction="none",
        )
        for rows, row_targets in chunks
    ]
    losses = torch.cat(parts)
    return losses if row_weights is None else losses * row_weights.to(losses.dtype)


class _LossAndGradients(torch.autograd.Function):
    """The sum of the losses, whose gradients are found beside it; products in `dtype`.

    Nothing waits for the device.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        row_weights: Tensor | None,
        excluded: int | None,
        dtype: torch.dtype,
        rows_at_once: int,
    ) -> Tensor:
        trained, exact = ctx.needs_input_grad[1], _exact(hidden)
        table, dhidden = weight.to(dtype), torch.empty_like(hidden)
        dweight = torch.zeros_like(weight if trained else weight[:0], dtype=exact)
        losses = torch.empty_like(targets, dtype=exact)
        chunks = (torch.split(x, rows_at_once) for x in (hidden, targets, losses, dhidden))
        factors: Iterable[Tensor | None] = repeat(None)
        if row_weights is not None:
            factors = torch.split(row_weights.to(exact), rows_at_once)
        # All that is as large as the logits, for every chunk: their products and they themselves.
        products = table.new_empty(min(rows_at_once, len(hidden)), len(table))
        buffer = products if dtype == exact else torch.empty_like(products, dtype=exact)
        for rows, row_targets, loss, drows, factor in zip(*chunks, factors, strict=False):
            narrow, logits = products[: len(rows)], buffer[: len(rows)]
            ignored = row_targets == IGNORED
            index = row_targets.masked_fill(ignored, 0).unsqueeze(1)
            torch.mm(rows.to(dtype), table.t(), out=narrow)
            if dtype != exact:
                logits.copy_(narrow)
            log_probs = torch.log_softmax(_without(logits, excluded), dim=1, out=logits)
            target_log_probs = log_probs.gather(1, index)
            loss.copy_(target_log_probs.squeeze(1).neg().masked_fill_(ignored, 0.0))

            # Softmax minus one at the target. Ignored rows are masked in tensors of width H, which
            # is cheaper than in the logits. Deterministic on CUDA, `scatter_` would copy from the
            # host.
            dlogits = log_probs.exp_()
            every_row = torch.arange(len(rows), device=rows.device)
            dlogits[every_row, index.squeeze(1)] = target_log_probs.expm1().squeeze(1)
            if factor is not None:
                loss.mul_(factor)
                dlogits.mul_(factor.unsqueeze(1))
            if dtype != exact:
                dlogits = narrow.copy_(dlogits)
            drows.copy_(torch.mm(dlogits, table).masked_fill_(ignored.unsqueeze(1), 0.0))
            if trained:
                learned = rows.to(dtype).masked_fill(ignored.unsqueeze(1), 0.0)
                _add_product(dweight, dlogits.t(), learned)
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        by_weight = dweight * grad if ctx.needs_input_grad[1] else None
        return dhidden * grad, by_weight, None, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right, in their dtype, to `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    # On a CPU `addmm` takes one dtype. The whole product would be half as large as `total`.
    at_once = max(1, PRODUCTS_AT_ONCE // right.size(1))
    for part, rows in zip(torch.split(total, at_once), torch.split(left, at_once), strict=True):
        part += torch.mm(rows, right)


def _without(logits: Tensor, excluded: int | None) -> Tensor:
    """`logits` [N, V] with the column of `excluded` set to minus infinity in place."""
    if excluded is not None:
        logits.select(1, excluded).fill_(-torch.inf)
    return logits


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows_at_once(rows: int, vocabulary: int, logits_at_once: int) -> int:
    """The rows of a chunk: chunks are about equally large, and whole tiles where they can be."""
    longest = max(1, logits_at_once // vocabulary)
    tile = TILE if longest >= TILE else 1
    count = max(1, -(-rows // (longest // tile * tile)))
    return max(1, -(-rows // (count * tile)) * tile)
