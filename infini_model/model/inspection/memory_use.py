"""How much of the output of each layer and head comes from the memory, and how large that is.

A head's output is s · A_mem + (1 − s) · A_local with s = sigmoid(gate) (arXiv 2404.07143, equation
10). The gate alone says little: the memory returns an average of many values, which may be short.
So both parts are measured: each layer attends twice more to the same input, with its gates so far
below and above zero that the result is A_local and A_mem themselves. Of a residual memory they are
the result with a weight of 0, and what the memory adds to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from infini_model.model.inspection.knock_out import FAR, closed, read_weights_at
from infini_model.model.kernels.memory_ops import memory_dtype
from infini_model.model.layers import Attention
from infini_model.model.llama import InfiniLlama
from infini_model.model.rotary import Rope
from infini_model.model.state import LayerState
from infini_model.runtime.errors import ConfigError

# The positional arguments of `Attention.forward`.
Arguments = tuple[Tensor, Rope, LayerState | None, Tensor | None, int]


class MemoryUse(NamedTuple):
    """Sums over the windows of a batch, all float64; those of several batches can be added.

    Attributes:
        shares: [layers, H], over positions, of the length of the memory's part over the sum of
            that and of the other's: |s · A_mem| / (|s · A_mem| + |(1 − s) · A_local|).
        positions: [], number of these positions: those with a target and a memory to read.
        norms: [layers, 2], over windows, the norms of the memory and of its normaliser (NaN if it
            has none) after the window, each a mean over the heads.
        windows: [], number of these windows: those with a target.
    """

    shares: Tensor
    positions: Tensor
    norms: Tensor
    windows: Tensor

    def __add__(self, other: MemoryUse) -> MemoryUse:  # type: ignore[override]
        """The sums over both."""
        return MemoryUse(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def mean_shares(self) -> Tensor:
        """[layers, H]; NaN where no position had a memory to read."""
        return self.shares / self.positions

    @property
    def mean_norms(self) -> Tensor:
        """[layers, 2], of the memory and of its normaliser."""
        return self.norms / self.windows


class Watch:
    """Measures each layer of one pass; complete when the pass is."""

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets
        self._layers: list[MemoryUse] = []

    def note(self, attention: Attention, arguments: Arguments, result: object) -> None:  # noqa: ARG002
        """The hook of an attention layer."""
        *_, reset, streams = arguments
        readable = _has_memory(self._targets, attention.config.segment_length, reset)
        chosen = (self._targets & readable).unsqueeze(2)
        is_residual = attention.config.memory == "residual"
        local, after = _attended(attention, arguments, closed(attention.config.memory))
        read, _ = _attended(attention, arguments, None if is_residual else FAR)
        # Of several streams the last is the one that predicts.
        exact = memory_dtype(read.dtype)
        local, read = (x.chunk(streams)[-1].to(exact) for x in (local, read))
        if is_residual:
            memory_part, local_part = (read - local).norm(dim=-1), local.norm(dim=-1)
        else:
            share = attention.gate.sigmoid()
            memory_part, local_part = share * read.norm(dim=-1), (1.0 - share) * local.norm(dim=-1)
        ratio = memory_part / (memory_part + local_part).clamp(min=torch.finfo(exact).tiny)
        windows = self._targets.any(1)
        held = after.memory.kv.flatten(2).norm(dim=2)
        total = torch.full_like(held, torch.nan)
        if after.memory.norm is not None:
            total = after.memory.norm.norm(dim=2)
        self._layers.append(
            MemoryUse(
                torch.where(chosen, ratio, 0.0).double().sum((0, 1)),
                chosen.sum().double(),
                torch.stack([x.mean(1).double() @ windows.double() for x in (held, total)]),
                windows.sum().double(),
            )
        )

    @property
    def use(self) -> MemoryUse:
        """What was measured."""
        shares, positions, norms, windows = zip(*self._layers, strict=True)
        return MemoryUse(torch.stack(shares), positions[0], torch.stack(norms), windows[0])


@contextmanager
def watched(model: InfiniLlama, targets: Tensor) -> Iterator[Watch]:
    """Measure the memory in one pass of `model` within the block, without gradients.

    It changes nothing of the pass, and no random number. Under FSDP it works as well: a layer has
    all of its weights while it computes.

    Args:
        model: A model with a memory; the pass is over whole windows.
        targets: [B, T] bool, the positions to measure at; with two streams those of the second.

    Raises:
        ConfigError: The model has no memory.
    """
    if model.config.memory == "none":
        raise ConfigError("model.memory: none, so there is no memory to measure")
    watch = Watch(targets)
    handles = [each.register_forward_hook(watch.note) for each in model.attentions]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _attended(
    attention: Attention, arguments: Arguments, weight: float | None
) -> tuple[Tensor, LayerState]:
    """What the heads return at this weight, or their own, [B, T, H, D], and the state after it."""
    seen: list[Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        changed = [] if weight is None else [attention.read_weight]
        with read_weights_at(changed, weight or 0.0):
            _, after = attention.forward(*arguments)  # not a call, which would be watched again
    finally:
        handle.remove()
    rows, tokens, _ = seen[0].shape
    return seen[0].reshape(rows, tokens, -1, attention.head_dim), cast("LayerState", after)


def _has_memory(targets: Tensor, length: int, reset: Tensor | None) -> Tensor:
    """Whether a position of windows like `targets` has a segment to read, [1 or B, T] bool."""
    segments = torch.arange(targets.size(1), device=targets.device) // length
    readable = (segments > 0).unsqueeze(0)
    return readable if reset is None else readable & ~reset[:, segments]
