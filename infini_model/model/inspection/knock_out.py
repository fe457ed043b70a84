"""Knocking out the memory of layers or heads, with the same weights.

A gate far below zero has a sigmoid of exactly 0, so the head's output is the local attention alone
(arXiv 2404.07143, equation 10). The memory is still written; it is not read. This shows what the
weights rely on, not what a memory is worth: for that a model has to be trained without one.
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
def gates_at(gates: Sequence[Tensor], value: float, head: int | None = None) -> Iterator[None]:
    """Set `gates`, each [H], to `value` within the block; those of one head, or of all."""
    kept = [gate.detach().clone() for gate in gates]
    try:
        with torch.no_grad():
            for gate in gates:
                (gate if head is None else gate[head]).fill_(value)
        yield
    finally:
        with torch.no_grad():
            for gate, before in zip(gates, kept, strict=True):
                gate.copy_(before)


@contextmanager
def knocked_out(
    model: InfiniLlama, layer: int | None = None, head: int | None = None
) -> Iterator[None]:
    """Let heads read no memory within the block; their gates come back bit for bit.

    Args:
        model: A model with a memory; its gates must not be sharded.
        layer: One layer; None is all.
        head: One query head of these layers; None is all.

    Raises:
        ConfigError: The model has no memory.
        IndexError: There is no such layer or head.
    """
    if model.config.memory == "none":
        raise ConfigError("model.memory: none, so there is no memory to knock out")
    chosen = list(model.model.layers)
    chosen = chosen if layer is None else [chosen[layer]]
    gates = [each.get_parameter("self_attn.gate") for each in chosen]
    with gates_at(gates, -FAR, head):
        yield
