"""Asking a model for the needles of haystacks, each of which it reads once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from infini_model.evaluation.retrieval.haystack import Haystacks
from infini_model.model.generate import read_prompts
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.state import State


class Answers(NamedTuple):
    """What a model answered: of each answer the number of tokens, and of those that are right.

    A token is right if it is the likeliest after the question and the right tokens before it. So
    greedy generation gives the whole answer if, and only if, all of its tokens are right.

    Attributes:
        right: [N, K] int64.
        tokens: [N, K] int64.
    """

    right: Tensor
    tokens: Tensor


@torch.inference_mode()
def ask(model: InfiniLlama, haystacks: Haystacks, rows: int) -> Answers:
    """Read `rows` bodies at once, in chunks and in constant memory, and ask for all needles.

    The results are on the CPU. The model must be causal.
    """
    parts = zip(*(torch.split(tensor, rows) for tensor in haystacks), strict=True)
    right = torch.cat([_right(model, Haystacks(*part)) for part in parts])
    counted = haystacks.answers != IGNORED
    return Answers((right & counted).sum(-1), counted.sum(-1))


def _right(model: InfiniLlama, haystacks: Haystacks) -> Tensor:
    """Whether each answer token is the likeliest, [N, K, A] bool."""
    answers = haystacks.answers
    said = answers[..., :-1].clamp(min=0)
    asked = torch.cat((haystacks.questions, said), -1).flatten(0, 1)
    state = read(model, haystacks.bodies).repeat(answers.size(1))
    device = model.lm_head.weight.device
    with model.precision.autocast(device):
        hidden, _ = model.extend(asked.to(device), state)
        logits = model.lm_head(hidden[:, haystacks.questions.size(-1) - 1 :])
    likeliest: Tensor = logits.argmax(-1).cpu()
    return likeliest.view_as(answers) == answers


def read(model: InfiniLlama, bodies: Tensor) -> State:
    """The state after `bodies` [N, H] on the CPU, read in chunks."""
    lengths = torch.full((len(bodies),), bodies.size(1))
    _, state = read_prompts(model, bodies, lengths)
    return state
