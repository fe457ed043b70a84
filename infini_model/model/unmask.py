"""Generation by a model of masked or block diffusion (LLaDA, arXiv 2502.09992, section 2.4).

The new tokens begin masked. Blocks are filled from left to right; in each step the model predicts
all masked tokens of the block, the most probable predictions stay, and the others are masked again.

An end of text is kept only once the model predicts nothing else in the block: after fine-tuning on
padded answers it is the most probable token long before the answer is written. What follows it in
the block is not generated.

A model of masked diffusion has one segment, its context. One of block diffusion (arXiv 2503.09573)
goes from segment to segment: each that is complete is written to the memory, so that nothing grows
with the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from infini_model.config import SampleConfig
from infini_model.model.generate import check_tokens, draw, read_prompts
from infini_model.model.llama import InfiniLlama
from infini_model.model.random import hashed, uniform
from infini_model.runtime.errors import UserError


def unmask(
    model: InfiniLlama,
    prompt: Sequence[int],
    settings: SampleConfig,
    seed: int = 0,
    end_token_ids: tuple[int, ...] = (),
) -> Iterator[list[int]]:
    """Continue `prompt`, up to the end of text or of a context without memory.

    Args:
        model: A bidirectional model with a mask token, used as in
            `infini_model.model.generate.generate`.
        prompt: Token ids; may be empty.
        settings: How many tokens are generated, if the context has room for them, how each is
            drawn from its logits, and in which blocks and steps.
        seed: The same seed gives the same tokens on every device.
        end_token_ids: Tokens that end a text; they are included.

    Yields:
        The tokens of each block, once it is complete.

    Raises:
        UserError: The prompt fills the context of a model without memory, a token of it is outside
            the vocabulary, or the model is causal.
    """
    mask, length = _check(model, prompt), model.config.segment_length
    ends = torch.tensor(end_token_ids, dtype=torch.int64)
    device = model.lm_head.weight.device
    state, known, new = None, [*prompt], settings.max_new_tokens
    if model.config.has_past:
        full = len(prompt) // length * length
        ids = torch.tensor([prompt[:full]], dtype=torch.int64)
        _, state = read_prompts(model, ids, torch.tensor([full]))
        known = known[full:]
    else:
        new = min(new, length - len(known))
    left, step, unmasking = new, 0, settings.unmasking

    def predict(ids: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens at the positions `masked` of a segment, and the confidence in each."""
        rows = ids.unsqueeze(0)
        with torch.inference_mode(), model.precision.autocast(device):
            hidden = model.hidden(rows) if state is None else model.extend(rows, state)[0]
            logits: Tensor = model.lm_head(hidden[0, masked.to(device)]).float()
            logits[:, mask] = -torch.inf  # the mask token has no probability
        drawn = uniform(hashed(seed, step, masked))
        tokens = draw(settings, logits, drawn)
        probabilities = logits.double().softmax(dim=-1)
        return tokens, probabilities.gather(1, tokens.unsqueeze(1)).squeeze(1)

    while left:
        segment = torch.tensor([*known, *[mask] * (length if state is not None else new)])
        ids = segment[:length].to(device)
        stop = min(len(ids), len(known) + left)
        for start in range(len(known), stop, unmasking.block_length):
            block = ids[start : min(start + unmasking.block_length, stop)]
            share = 1.0 if unmasking.steps is None else unmasking.steps / new
            steps_left = max(1, round(share * len(block)))
            while len(masked := (block == mask).nonzero().squeeze(1).cpu()):
                tokens, confidence = predict(ids, masked + start)
                is_end = torch.isin(tokens, ends.to(tokens.device))
                order = (confidence - 2.0 * is_end).argsort(descending=True, stable=True)
                kept = order[: math.ceil(len(masked) / steps_left)]
                block[masked.to(block.device)[kept]] = tokens[kept]
                # What follows an end is not generated.
                if len(found := torch.isin(block.cpu(), ends).nonzero()):
                    behind = block[int(found[0]) :]
                    behind[behind == mask] = behind[0].item()
                steps_left, step = max(1, steps_left - 1), step + 1
            complete: list[int] = block.tolist()
            first = next((n for n, token in enumerate(complete) if token in ends), None)
            if first is not None:
                yield complete[: first + 1]
                return
            yield complete
        left -= stop - len(known)
        if left and state is not None:
            with torch.inference_mode(), model.precision.autocast(device):
                _, state = model.extend(ids.unsqueeze(0), state)
            known = []


def _check(model: InfiniLlama, prompt: Sequence[int]) -> int:
    """The mask token. Raises `UserError` as `unmask` does."""
    config, mask = model.config, model.config.mask_token_id
    if mask is None or not config.bidirectional:
        raise UserError("the model is causal: it has no mask token to generate from")
    if not config.has_past and len(prompt) >= config.segment_length:
        raise UserError(
            f"prompt: its {len(prompt):,} tokens leave no room in the model's context of "
            f"{config.segment_length:,}"
        )
    check_tokens("prompt", torch.tensor(prompt), model.lm_head.out_features)
    return mask
