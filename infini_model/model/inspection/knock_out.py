"""Knocking out the memory of layers or heads, with the same weights.

A gate far below zero has a sigmoid of exactly 0, so the head's output is the local attention alone
(arXiv 2404.07143, equation 10); so it is where the weight of a residual memory is 0. The memory is
still written; it is not read. This shows what the weights rely on, not what a memory is worth: for
that a model has to be trained without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import ConfigError

# sigmoid(-FAR) is exactly 0 and sigmoid(FAR) exactly 1; float16 holds it, too.
FAR = 1e4


@contextmanager
def read_weights_at(
    weights: Sequence[Tensor], value: float, head: int | None = None
) -> Iterator[None]:
    """Set the `read_weight` of layers to `value` within the block; that of one head, or of all."""
    kept = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                (weight if head is None else weight[head]).fill_(value)
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


def closed(memory: str) -> float:
    """The `read_weight` with which a head reads nothing of this kind of memory."""
    return 0.0 if memory == "residual" else -FAR


@contextmanager
def knocked_out(
    model: InfiniLlama, layer: int | None = None, head: int | None = None
) -> Iterator[None]:
    """Let heads read no memory within the block; their weights come back bit for bit.

    Args:
        model: A model with a memory; its weights must not be sharded.
        layer: One layer; None is all.
        head: One query head of these layers; None is all.

    Raises:
        ConfigError: The model has no memory.
        IndexError: There is no such layer or head.
    """
    if model.config.memory == "none":
        raise ConfigError("model.memory: none, so there is no memory to knock out")
    chosen = model.attentions if layer is None else [model.attentions[layer]]
    weights = [attention.read_weight for attention in chosen]
    with read_weights_at(weights, closed(model.config.memory), head):
        yield
