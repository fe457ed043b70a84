"""The interface of an objective, and the module that computes its loss.

Randomness of an objective is keyed by (seed, `Batch.keys`), so that a resumed training draws what
the uninterrupted one would have drawn.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn

from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama

Reduction = Literal["sum", "none"]


class Inputs(NamedTuple):
    """What a model reads and what it is to predict there.

    Attributes:
        input_ids: int64 [B, T].
        labels: int64 [B, T], the target at each position, -100 where there is none.
        reset: bool [B, T / segment_length], true where the memory is emptied first, or None.
    """

    input_ids: Tensor
    labels: Tensor
    reset: Tensor | None


class Objective(Protocol):
    """What the loss of a batch is."""

    def inputs(self, batch: Batch) -> Inputs:
        """Inputs and targets of `batch`, on its device."""

    def counted(self, inputs: Inputs) -> Tensor:
        """bool [B, T], the positions whose number the summed loss of a batch is divided by."""

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """`sum` of the losses, [], or `none`: each one [B, T], 0 where there is no target.

        Float32 (float64 for a float64 model). Only the sum is meant for a backward pass.
        """


class LossModule(nn.Module):
    """A model and its loss in one forward pass, which is what DDP and FSDP have to see."""

    def __init__(self, model: InfiniLlama, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, inputs: Inputs, reduction: Reduction = "sum") -> Tensor:
        """As `Objective.loss`."""
        return self.objective.loss(self.model, inputs, reduction)
