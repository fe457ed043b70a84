"""The interface of an evaluation task, and what a task gives to the report."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from infini_model.evaluation.context import EvalContext, Pass
from infini_model.evaluation.statistics import Interval


class TaskResult(BaseModel):
    """The result of a task.

    Attributes:
        metrics: For MLflow and `evaluation.json`, under names such as `evaluation/test_loss`.
        intervals: Intervals of 95%, (low, high), of metrics by their names. One that is infinite,
            as that of a single document, is left out: JSON has no infinity.
        section: Markdown below the task's title.
        summary: Sentences of Markdown for the head of the report: what was found.
        advice: Sentences of Markdown for the head of the report: what to do about it.
        pictures: Plots shown below the section, by caption.
    """

    model_config = ConfigDict(frozen=True)

    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    section: str
    summary: list[str] = []
    advice: list[str] = []
    pictures: dict[str, Path] = {}

    @classmethod
    def of(cls, found: Mapping[str, Interval], **others: Any) -> Self:
        """A result whose metrics are estimates with an interval each."""
        return cls(
            metrics={name: each.estimate for name, each in found.items()},
            intervals={
                k: (x.low, x.high) for k, x in found.items() if math.isfinite(x.low + x.high)
            },
            **others,
        )


class EvaluationTask(ABC):
    """One measurement. The same model, dataset and settings give the same result."""

    title: str

    def work(self, context: EvalContext) -> dict[Pass | str, int]:  # noqa: ARG002
        """Numbers of windows and sequences to report: of passes, and of its own by its title."""
        return {}

    def check(self, context: EvalContext) -> None:  # noqa: B027 - most refuse nothing
        """Raise `UserError` where settings do not fit the model or the dataset; nothing by default.

        It is called for all tasks before the first one is scored.
        """

    @abstractmethod
    def run(self, context: EvalContext) -> TaskResult:
        """Run the measurement with the settings in `context.config.evaluation`.

        A task that has nothing to measure says so in its section.
        """
