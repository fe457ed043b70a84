"""Model FLOPs utilization (MFU) of training steps.

FLOPs are counted as in `infini_model.training.callbacks.flops`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import stopwatch, take_turns
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.kernels.local_attention import can_be_compiled, resolve_backend
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.training.callbacks.flops import flops_per_token
from infini_model.training.optimizer import make_optimizer

# 1.07 billion parameters without the embedding.
BILLION = ModelConfig(
    vocab_size=32_000,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    intermediate_size=8192,
    segment_length=2048,
)


class Shape(NamedTuple):
    """The batch of a step: `rows` of `length` tokens, with or without activation checkpointing.

    `aligned` is as in `PackingConfig.mode`: the memory is emptied before every second segment, and
    the last eighth of each segment is padding. `compiled` is `launch.compile`.
    """

    rows: int
    length: int
    checkpointing: bool
    aligned: bool = False
    compiled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows * self.length

    def __str__(self) -> str:
        return (
            f"{self.length:,} tokens"
            + ", checkpointed" * self.checkpointing
            + ", aligned" * self.aligned
            + ", compiled" * self.compiled
        )


class Training:
    """A model on a device and its training steps, as in `infini_model.training`.

    Weights are float32, matrix products bfloat16 on CUDA, and the optimizer is the training's own.
    """

    def __init__(self, config: ModelConfig, device: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = InfiniLlama(config).to(device)
        self._config = TrainingConfig()
        self._optimizer = make_optimizer(self.model, self._config)
        self._device = device
        kernel = resolve_backend(
            *("auto", torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32),
            *(config.head_dim, config.segment_length),
        )
        self._attention_compiles = can_be_compiled(kernel)

    def step(self, shape: Shape) -> None:
        """Forward, backward and update with a batch of random tokens."""
        device, vocab_size = self._device, self.model.lm_head.out_features
        tokens = torch.randint(vocab_size, (shape.rows, shape.length + 1), device=device)
        decoder = self.model.model
        decoder.gradient_checkpointing = shape.checkpointing
        attention = shape.compiled and self._attention_compiles
        decoder.compile_layers(attention=attention, feed_forward=shape.compiled)
        # A step that ran out of memory may have left gradients.
        self._optimizer.zero_grad(set_to_none=True)
        labels, reset = tokens[:, 1:], None
        if shape.aligned:
            labels, reset = self._align(labels)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = self.model(tokens[:, :-1], labels=labels, reset=reset).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()

    def _align(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of documents that start at every second segment, and where the memory is reset."""
        segment = self.model.config.segment_length
        places = torch.arange(labels.size(1), device=self._device)
        padding = places % segment >= segment - segment // 8
        starts = places[::segment] // segment % 2 == 0
        return labels.masked_fill(padding, IGNORED), starts.expand(labels.size(0), -1)

    def fit(self, shape: Shape) -> Shape:
        """Take a step; returns the shape, with rows halved until they fit into memory.

        Raises:
            torch.OutOfMemoryError: A single row does not fit.
        """
        try:
            self.step(shape)
        except torch.OutOfMemoryError:
            if shape.rows == 1:
                raise
        else:
            return shape
        torch.cuda.empty_cache()
        return self.fit(shape._replace(rows=shape.rows // 2))


def utilization(
    training: Training, shapes: Sequence[Shape], turns: int, peak: float
) -> dict[Shape, list[float]]:
    """The MFU of each shape in each turn, on a device with a peak of `peak` FLOP/s.

    The returned shapes may have fewer rows; see `Training.fit`.
    """
    fitting = {str(shape): training.fit(shape) for shape in shapes}
    peers = {
        name: stopwatch(functools.partial(training.step, shape)) for name, shape in fitting.items()
    }
    seconds = take_turns(peers, turns)
    return {
        shape: [
            flops_per_token(training.model, shape.length) * shape.tokens / (each * peak)
            for each in seconds[name]
        ]
        for name, shape in fitting.items()
    }
