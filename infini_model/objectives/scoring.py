"""Scoring windows by segment, for validation in training and for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.layers import Part
from infini_model.model.precision import Precision
from infini_model.objectives.objective import LossModule


class Scorer:
    """Scores batches on one device, in the training precision, without gradients."""

    def __init__(self, module: LossModule, precision: Precision, device: torch.device) -> None:
        self._module, self._precision, self._device = module, precision, device

    def score(self, batch: Batch, without: Part | None = None) -> Tensor:
        """Loss sums and target counts by window and segment: [B, 2, S] float64 on the device.

        `without` is a part of the attention that is knocked out.
        """
        both = torch.stack(self.losses(batch, without), 1)
        windows, _, length = both.shape
        segment_length = min(self._module.model.config.segment_length, length)
        return both.reshape(windows, 2, -1, segment_length).sum(3)

    def losses(self, batch: Batch, without: Part | None = None) -> tuple[Tensor, Tensor]:
        """The loss and the count of each target, both [B, T] float64 on the device, 0 elsewhere."""
        inputs = self._module.objective.inputs(batch.to(self._device))._replace(without=without)
        with torch.no_grad(), self._precision.autocast(self._device):
            losses: Tensor = self._module(inputs, "none")
        return losses.double(), inputs.counted.double()
