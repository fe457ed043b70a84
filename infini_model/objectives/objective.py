"""The interface of an objective, and the module that computes its loss.

An objective's randomness is keyed by (seed, `Batch.keys`), so a resumed run draws the same numbers
as an uninterrupted one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama

Reduction = Literal["sum", "none"]


class Inputs(NamedTuple):
    """Model inputs and targets.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T], the target at each position, or -100 for none.
        reset: bool [B, T / segment_length], true where the memory is emptied first, or None.
    """

    input_ids: Tensor
    labels: Tensor
    reset: Tensor | None


class Objective(Protocol):
    """A training objective: inputs, targets and loss of a batch."""

    def inputs(self, batch: Batch) -> Inputs:
        """Inputs and targets of `batch`, on its device."""

    def counted(self, inputs: Inputs) -> Tensor:
        """bool [B, T], the positions counted in the divisor of the batch's summed loss."""

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """The `sum` of the losses, [], or with `none` each loss, [B, T], 0 without a target.

        Float32 (float64 for a float64 model). Only the sum is meant for a backward pass.
        """


class LossModule(nn.Module):
    """A model and its loss as one module, so that DDP and FSDP wrap both."""

    def __init__(self, model: InfiniLlama, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, inputs: Inputs, reduction: Reduction = "sum") -> Tensor:
        """As `Objective.loss`."""
        return self.objective.loss(self.model, inputs, reduction)
