"""The interface of an evaluation task, and loading one by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel, ConfigDict

from infini_model.config.evaluation import EvaluationTaskName
from infini_model.evaluation.subject import Pass, Subject


class Picture(BaseModel):
    """A plot in the report."""

    model_config = ConfigDict(frozen=True)

    path: Path
    caption: str


class TaskResult(BaseModel):
    """The result of a task.

    Attributes:
        metrics: For MLflow and `evaluation.json`, under names such as `evaluation/test_loss`.
        section: Markdown below the task's title.
        pictures: Plots shown below the section.
        details: All measurements, as JSON.
    """

    model_config = ConfigDict(frozen=True)

    metrics: dict[str, float] = {}
    section: str
    pictures: list[Picture] = []
    details: dict[str, Any] = {}


class EvaluationTask(Protocol):
    """One measurement. The same subject and settings give the same result."""

    title: str

    def scores(self, subject: Subject) -> set[Pass]:
        """The passes over a split that it takes the scores of."""

    def run(self, subject: Subject) -> TaskResult:
        """Run the measurement with the settings in `subject.config.evaluation`."""


def load_task(name: EvaluationTaskName) -> EvaluationTask:
    """The task in the module of that name."""
    module = import_module(f"infini_model.evaluation.tasks.{name}")
    return cast("EvaluationTask", module.Task())
