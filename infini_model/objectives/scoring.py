"""Scoring windows by segment, for validation in training and for evaluation."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.layers import Part
from infini_model.model.loss import IGNORED
from infini_model.model.precision import Precision
from infini_model.objectives.objective import Inputs, LossModule


class Scorer:
    """Scores batches on one device, in the training precision, without gradients.

    `byte_lengths` is as `Tokenizer.byte_lengths` returns it.
    """

    def __init__(
        self,
        module: LossModule,
        precision: Precision,
        device: torch.device,
        byte_lengths: np.ndarray,
    ) -> None:
        self._module, self._precision, self._device = module, precision, device
        self._byte_lengths = torch.from_numpy(byte_lengths).to(device)

    def score(self, batch: Batch, without: Part | None = None) -> Tensor:
        """Loss sums, and targets and their bytes, by window and segment.

        `without` is a part of the attention that is knocked out. [B, 3, S] float64 on the device.
        """
        inputs = self._inputs(batch, without)
        targets = torch.where(inputs.labels != IGNORED, inputs.labels, inputs.input_ids)
        sizes = self._byte_lengths[targets.clamp(max=len(self._byte_lengths) - 1)]
        counted = inputs.counted.double()
        found = torch.stack((self._losses(inputs), counted, sizes * counted), 1)
        windows, _, length = found.shape
        segment_length = min(self._module.model.config.segment_length, length)
        return found.reshape(windows, 3, -1, segment_length).sum(3)

    def losses(self, batch: Batch, without: Part | None = None) -> tuple[Tensor, Tensor]:
        """The loss and the count of each target, both [B, T] float64 on the device, 0 elsewhere."""
        inputs = self._inputs(batch, without)
        return self._losses(inputs), inputs.counted.double()

    def _inputs(self, batch: Batch, without: Part | None) -> Inputs:
        return self._module.objective.inputs(batch.to(self._device))._replace(without=without)

    def _losses(self, inputs: Inputs) -> Tensor:
        with torch.no_grad(), self._precision.autocast(self._device):
            losses: Tensor = self._module(inputs, "none")
        return losses.double()


def bits_per_byte(loss: float, size: float) -> float | None:
    """The bits that a loss, summed in nats, is for each of `size` bytes; None without any.

    Unlike the loss per token it does not depend on how a tokenizer cuts a text. The loss of the
    tokens that end a text is in it, though they are no bytes.
    """
    return loss / (math.log(2.0) * size) if size else None
