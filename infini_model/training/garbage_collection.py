"""Python's collection of garbage, on all ranks at the same steps.

Left to itself each rank looks for garbage at steps of its own, and the others wait for it.
torchtitan does the same.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

from infini_model.training.callbacks import Callback, Evaluation, Status, Step

# Steps between two collections of what is young.
STEPS = 50


class GarbageCollection(Callback):
    """Collects garbage every `STEPS` steps and after an evaluation, and at no other time."""

    def on_start(self, step: int) -> None:  # noqa: ARG002
        """Put all objects that there are aside: none of them becomes garbage before the end."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if step.number % STEPS == 0:
            gc.collect(1)

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        gc.collect()

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        gc.enable()
        gc.unfreeze()
