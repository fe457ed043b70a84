"""Autoregressive generation in memory that does not grow with the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from infini_model.config import SampleConfig
from infini_model.config.explaining import one_line
from infini_model.model.llama import InfiniLlama
from infini_model.model.state import State
from infini_model.runtime.errors import UserError

# Prompt tokens, over all rows, that are processed at once where all rows have full segments.
PREFILL_TOKENS = 4096

Prompts = Tensor | Sequence[Sequence[int]]


def sampling(**settings: Any) -> SampleConfig:
    """Return these settings. Raises `UserError` if one is out of its range."""
    try:
        return SampleConfig(**settings)
    except ValidationError as error:
        raise UserError(one_line(error)) from error


def check_seed(seed: int) -> None:
    """Raise `UserError` if the seed is not a whole number, or negative."""
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"seed: got {seed!r}; takes a whole number, 0 or more")


def draw(settings: SampleConfig, logits: Tensor, drawn: Tensor) -> Tensor:
    """Draw one token per row, [N] int64, from logits [N, V].

    `drawn` are numbers in [0, 1), float64 [N]; where they fall among the cumulative probabilities
    decides the tokens.
    """
    logits = logits.float()
    if settings.temperature == 0.0:
        return logits.argmax(dim=-1)
    ordered, tokens = logits.topk(min(settings.top_k or logits.size(-1), logits.size(-1)))
    # Subtracting the maximum first avoids overflow at small temperatures.
    scaled = (ordered - ordered[:, :1]) / settings.temperature
    weights = scaled.softmax(dim=-1, dtype=torch.float64)
    if settings.top_p is not None:
        before = weights.cumsum(dim=-1) - weights
        weights = weights.masked_fill(before >= settings.top_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    below = cumulative / cumulative[:, -1:] <= drawn.to(cumulative.device).unsqueeze(1)
    return tokens.gather(1, below.sum(dim=-1, keepdim=True)).squeeze(1)


def generate(
    model: InfiniLlama,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, without the prompt, in `model.precision`.

    Arguments that are not described here are those of `infini_model.config.SampleConfig`.

    Args:
        model: A causal model, used on its own device.
        prompts: Token ids, [B, T] or one list per prompt. Lengths may differ; up to rounding, no
            row depends on another.
        eos_token_id: Token that ends a text, or several of them; it is included.
        seed: Row i is sampled from a generator seeded with (seed, i): the same tokens on every
            device.

    Raises `UserError` for an empty prompt, a token outside the vocabulary, a setting out of its
    range, or a bidirectional model.
    """
    check_seed(seed)
    settings = sampling(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p
    )
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
    rows = zip(*stream(model, prompts, settings, seed, ends), strict=True)
    return [[token for token in row if token is not None] for row in rows]


def stream(
    model: InfiniLlama,
    prompts: Prompts,
    settings: SampleConfig,
    seed: int = 0,
    end_token_ids: tuple[int, ...] = (),
    *,
    rows: Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """Like `generate`, but yield tokens as they are sampled.

    `rows` are the numbers of the rows, which seed their generators; 0, 1, … by default.

    Yields:
        One token per row; None for a row that has ended. Stops when all rows have ended.
    """
    ids, lengths = _pad(prompts, model.lm_head.out_features)
    numbers = rows or range(len(lengths))
    generators = [np.random.default_rng((seed, row)) for row in numbers]
    device = model.lm_head.weight.device
    logits, state = read_prompts(model, ids, lengths)
    ended = [False] * len(lengths)
    for number in range(1, settings.max_new_tokens + 1):
        drawn = torch.tensor([each.random() for each in generators], dtype=torch.float64)
        tokens = draw(settings, logits, drawn)
        sampled: list[int] = tokens.tolist()
        yield [None if end else token for token, end in zip(sampled, ended, strict=True)]
        ended = [end or token in end_token_ids for token, end in zip(sampled, ended, strict=True)]
        if all(ended) or number == settings.max_new_tokens:
            return
        with torch.inference_mode(), model.precision.autocast(device):
            hidden, state = model.advance(tokens[:, None], state, in_place=True)
            logits = model.lm_head(hidden[:, -1])


def _pad(prompts: Prompts, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Prompts as [B, longest], zero-padded on the right, and their lengths [B], on the CPU."""
    rows = [torch.as_tensor(row, dtype=torch.int64, device="cpu") for row in prompts]
    if not rows:
        raise UserError("prompts: expected at least one, got none")
    for number, row in enumerate(rows):
        if row.dim() != 1 or len(row) == 0:
            raise UserError(f"prompt {number}: is empty")
        check_tokens(f"prompt {number}", row, vocab_size)
    lengths = torch.tensor([len(row) for row in rows], device="cpu")
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths


def check_tokens(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise `UserError` if one of the `ids` is no token."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        token = int(outside[0])
        raise UserError(f"{name}: token {token} is outside the vocabulary of {vocab_size}")


def chunk_width(rows: int, segment_length: int) -> int:
    """The width of a chunk of whole segments: at least one, at most `PREFILL_TOKENS` in all."""
    return max(1, PREFILL_TOKENS // (rows * segment_length)) * segment_length


@torch.inference_mode()
def read_prompts(
    model: InfiniLlama, ids: Tensor, lengths: Tensor, state: State | None = None
) -> tuple[Tensor, State]:
    """Process prompts in chunks: the next logits [B, V] and the state after the prompts.

    `ids` [B, longest] are padded on the right; they and `lengths` [B] int64 are on the CPU. `state`
    is that before them, which becomes invalid; None if nothing precedes them. A model of block
    diffusion reads prompts of whole segments only.
    """
    device = model.lm_head.weight.device
    width = chunk_width(len(lengths), model.config.segment_length)
    state = model.empty_state(len(lengths)) if state is None else state
    last = model.model.norm.weight.new_zeros(len(lengths), model.config.hidden_size)
    with model.precision.autocast(device):
        for start in range(0, ids.size(1), width):
            chunk = ids[:, start : start + width].to(device)
            counts = (lengths - start).clamp(0, chunk.size(1))
            hidden, state = model.extend(chunk, state, counts=counts, in_place=True)
            newest = hidden[range(len(counts)), (counts - 1).tolist()].to(last.dtype)
            last = torch.where((counts > 0).to(device)[:, None], newest, last)
        return model.lm_head(last), state
