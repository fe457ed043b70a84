"""Sampling a token from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.runtime.errors import UserError


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    """Raise `UserError` if a setting is out of its range."""
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens: got {max_new_tokens}, needs 0 or more")
    if not 0.0 <= temperature < float("inf"):
        raise UserError(f"temperature: got {temperature}, needs 0 or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k: got {top_k}, needs 1 or more")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise UserError(f"top_p: got {top_p}, needs more than 0 and at most 1")
    if seed < 0:
        raise UserError(f"seed: got {seed}, needs 0 or more")


def sample_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, drawn: Tensor
) -> Tensor:
    """One token per row, [N] int64, from logits [N, V].

    `drawn` are numbers in [0, 1), float64 [N]; where they fall among the cumulative probabilities
    decides the tokens.
    """
    logits = logits.float()
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    ordered, tokens = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))
    # Subtracting the maximum first avoids overflow at small temperatures.
    weights = ((ordered - ordered[:, :1]) / temperature).softmax(dim=-1, dtype=torch.float64)
    if top_p is not None:
        before = weights.cumsum(dim=-1) - weights
        weights = weights.masked_fill(before >= top_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    below = cumulative / cumulative[:, -1:] <= drawn.to(cumulative.device).unsqueeze(1)
    return tokens.gather(1, below.sum(dim=-1, keepdim=True)).squeeze(1)
