"""The evaluation tasks, a module each."""

from __future__ import annotations

from pkgutil import resolve_name

from infini_model.config.evaluation import EvaluationTaskName
from infini_model.evaluation.task import EvaluationTask

# Module and class of each task; a module is imported if its task is run.
TASKS: dict[EvaluationTaskName, str] = {
    "loss": "loss:Loss",
    "loss_by_position": "by_position:LossByPosition",
    "sample": "sample:Sample",
    "passkey": "passkey:Passkey",
    "lm_eval": "lm_eval:LmEval",
}


def load_task(name: EvaluationTaskName) -> EvaluationTask:
    """The task of that name. Raises `UserError` if a package that it needs is not installed."""
    task: EvaluationTask = resolve_name(f"{__name__}.{TASKS[name]}")()
    return task
