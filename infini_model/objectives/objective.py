"""The interface of an objective, and the module that computes its loss.

An objective's randomness is keyed by (seed, `Batch.noise_keys`), so a resumed run draws the same
numbers as an uninterrupted one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from infini_model.data.loading.windows import Batch
from infini_model.model.layers import Part
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import fused_linear_cross_entropy, token_losses

Reduction = Literal["sum", "none"]
REDUCTIONS = {"sum": fused_linear_cross_entropy, "none": token_losses}


class Inputs(NamedTuple):
    """Model inputs and targets.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T], the target at each position, or -100 for none.
        document_starts: bool [B, T / segment_length], true where a segment starts a new document,
            or None.
        counted: bool [B, T], whether the position counts in the divisor of the batch's summed loss.
        weights: float32 [B, T], the factor of each loss in the sum; None is 1.
        without: The part of the attention that is knocked out, to measure what it contributes.
    """

    input_ids: Tensor
    labels: Tensor
    document_starts: Tensor | None
    counted: Tensor
    weights: Tensor | None = None
    without: Part | None = None


class Objective(Protocol):
    """A training objective: inputs, targets and loss of a batch."""

    def inputs(self, batch: Batch) -> Inputs:
        """Inputs and targets of `batch`, on its device."""

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
