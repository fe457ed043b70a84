"""Log-likelihoods of texts under a causal model, as EleutherAI's lm-evaluation-harness counts them.

A model with a memory has no longest text: it reads all of it, segment by segment, in memory that
does not grow. One without reads what any Llama of context `segment_length` reads in the harness:
the last tokens before each scored one, and a long text in disjoint windows. Up to rounding, no
result depends on what is scored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from infini_model.config import ModelConfig
from infini_model.model.generate import chunk_width
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import LOGITS_AT_ONCE


def score(
    model: InfiniLlama,
    pairs: Sequence[tuple[list[int], list[int]]],
    batch_size: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[tuple[float, bool]]:
    """Score the tokens of each continuation after its context, which has at least one token.

    `batch_size` texts are read at once; `on_batch` is called after each of these batches.

    Returns:
        The log-likelihood of each in nats, and whether each token of it is the most likely one.
    """
    windows = [
        (number, *window)
        for number, (context, continuation) in enumerate(pairs)
        for window in _windows(model.config, context, continuation)
    ]
    windows.sort(key=lambda window: -len(window[1]))
    found = [(0.0, True)] * len(pairs)
    for first in range(0, len(windows), batch_size):
        numbers, *read = zip(*windows[first : first + batch_size], strict=True)
        for number, total, greedy in zip(numbers, *_score_batch(model, *read), strict=True):
            before, was_greedy = found[number]
            found[number] = (before + total, was_greedy and greedy)
        on_batch()
    return found


def _windows(
    config: ModelConfig, context: list[int], continuation: list[int]
) -> Iterator[tuple[list[int], int]]:
    """Yield windows that score each token of the continuation once.

    Each is the ids that are read, as far back as the model reads, and how many of them are scored,
    the last ones. Those of a model without a memory are the harness's own for a context of
    `segment_length`.
    """
    ids = context + continuation
    longest = len(ids) if config.has_past else config.segment_length
    for start in range(len(context), len(ids), longest):
        end = min(start + longest, len(ids))
        yield ids[max(0, end - 1 - longest) : end], end - start


@torch.inference_mode()
def _score_batch(
    model: InfiniLlama, texts: Sequence[list[int]], scored: Sequence[int]
) -> tuple[list[float], list[bool]]:
    """Score the last tokens chunk by chunk, in memory that does not grow with the texts."""
    device = model.lm_head.weight.device
    ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    ends, position = torch.tensor([[len(text)] for text in texts]), torch.arange(ids.size(1))
    is_scored = (position < ends) & (position >= ends - torch.tensor(scored)[:, None])
    state = model.empty_state(len(texts))
    totals = torch.zeros(len(texts), dtype=torch.float64)
    is_greedy = torch.ones(len(texts), dtype=torch.bool)
    width = chunk_width(len(texts), model.config.segment_length)
    most = max(1, LOGITS_AT_ONCE // model.lm_head.out_features)
    for start in range(0, ids.size(1) - 1, width):
        end = min(start + width, ids.size(1) - 1)
        with model.precision.autocast(device):
            hidden, state = model.extend(ids[:, start:end].to(device), state)
            asked = is_scored[:, start + 1 : end + 1].nonzero()
            for row, column in (some.unbind(1) for some in torch.split(asked, most)):
                targets = ids[row, start + 1 + column].to(device)
                logits = model.lm_head(hidden[row.to(device), column.to(device)]).float()
                found = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
                totals.index_add_(0, row, found.double().cpu())
                is_greedy[row[(logits.argmax(-1) != targets).cpu()]] = False
    return totals.tolist(), is_greedy.tolist()
