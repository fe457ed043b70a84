"""Tasks of EleutherAI's lm-evaluation-harness, local ones or its own."""

from __future__ import annotations

from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.harness.adapter import harness_model
from infini_model.evaluation.harness.answering import Answerer
from infini_model.evaluation.harness.metrics import Measured
from infini_model.evaluation.harness.suite import Suite, load_suites
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, TaskResult
from infini_model.runtime.errors import UserError


class Task(EvaluationTask):
    """Runs the tasks that `evaluation.lm_eval` names; each that has finished is kept."""

    title = "lm-evaluation-harness"

    def __init__(self) -> None:
        self._suites: list[Suite] = []

    def check(self, subject: Subject) -> None:
        """Load the documents of all tasks; refuse a wrong name, and a model of diffusion."""
        self._loaded(subject)

    def sequences(self, subject: Subject) -> int:
        """The documents of all tasks."""
        return sum(suite.documents for suite in self._loaded(subject))

    def run(self, subject: Subject) -> TaskResult:
        """Run one task of the harness after another."""
        by_suite = {suite.name: _measure(suite, subject) for suite in self._loaded(subject)}
        measured = [each for found in by_suite.values() for each in found]
        named = {f"evaluation/{each.task}_{each.metric}": each for each in measured}
        return TaskResult(
            metrics={name: each.value for name, each in named.items()},
            intervals={name: each.interval for name, each in named.items() if each.interval},
            section=_section(measured),
            summary=[_sentence(name, found) for name, found in by_suite.items() if found],
            details={"measured": [each.model_dump() for each in measured]},
        )

    def _loaded(self, subject: Subject) -> list[Suite]:
        objective = subject.config.training.objective
        if objective != "causal":
            raise UserError(
                f"evaluation.tasks: lm_eval needs a model of training.objective=causal, this one "
                f"is of {objective}"
            )
        self._suites = self._suites or load_suites(subject.config.evaluation.lm_eval)
        return self._suites


def _measure(suite: Suite, subject: Subject) -> list[Measured]:
    """The metrics of one task, kept or measured."""
    reported = 0

    def report(share: float) -> None:
        nonlocal reported
        # A task with requests of two kinds goes through its documents twice.
        done = int(share * suite.documents)
        if done > reported:
            subject.on_windows(done - reported)
            reported = done

    seed = subject.config.run.seed
    answerer = Answerer(
        subject.model,
        load_dataset_tokenizer(subject.dataset_dir),
        batch_size=subject.config.evaluation.batch_size,
        precision=subject.precision,
        seed=seed,
        on_share=report,
    )
    model, cells = harness_model(answerer), subject.cells("lm_eval", suite.identity())
    kept = cells.measured(
        "measured", lambda: [each.model_dump(mode="json") for each in suite.run(model, seed)]
    )
    report(1.0)
    return [Measured.model_validate(each) for each in kept]


def _sentence(name: str, measured: list[Measured]) -> str:
    """The first metric of a task, or that of a group as a whole."""
    first = next((each for each in measured if each.task == name), measured[0])
    interval = "" if first.interval is None else f" ({_span(first)})"
    return (
        f"`{first.task}` of the lm-evaluation-harness: {first.metric} is "
        f"**{first.value:.4f}**{interval} over {first.documents:,} documents."
    )


def _section(measured: list[Measured]) -> str:
    rows = [
        (
            each.task,
            each.metric,
            f"{each.value:.4f}",
            _span(each),
            str(each.shots),
            f"{each.documents:,}",
        )
        for each in measured
    ]
    return table(("Task", "Metric", "Value", "Interval of 95%", "Examples", "Documents"), rows)


def _span(measured: Measured) -> str:
    if measured.interval is None:
        return "–"
    low, high = measured.interval
    return f"{low:.4f} to {high:.4f}"
