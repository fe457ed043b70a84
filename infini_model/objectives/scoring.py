"""Scoring windows by segment, for validation in training and for evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from infini_model.data.loading.windows import Batch
from infini_model.model.precision import Precision
from infini_model.objectives.objective import LossModule


class Scorer:
    """Scores batches on one device, in the training precision, without gradients."""

    def __init__(self, module: LossModule, precision: Precision, device: torch.device) -> None:
        self._module, self._precision, self._device = module, precision, device

    def score(self, batch: Batch, *, empty_memory: bool = False) -> Tensor:
        """Loss sums and target counts by segment: [2, S] float64 on the device.

        `empty_memory` empties the memory before every segment, to measure what it contributes.
        """
        both = torch.stack(self.losses(batch, empty_memory=empty_memory))
        windows, length = both.shape[1:]
        segment_length = min(self._module.model.config.segment_length, length)
        return both.reshape(2, windows, -1, segment_length).sum(dim=(1, 3))

    def losses(self, batch: Batch, *, empty_memory: bool = False) -> tuple[Tensor, Tensor]:
        """The loss and the count of each target, both [B, T] float64 on the device, 0 elsewhere."""
        inputs = self._module.objective.inputs(batch.to(self._device))
        windows, length = inputs.input_ids.shape
        segment_length = min(self._module.model.config.segment_length, length)
        if empty_memory:
            reset = torch.ones(windows, length // segment_length, dtype=torch.bool)
            inputs = inputs._replace(reset=reset.to(self._device))
        with torch.no_grad(), self._precision.autocast(self._device):
            losses: Tensor = self._module(inputs, "none")
        return losses.double(), inputs.counted.double()
