"""The head of a report: what was trained, on what, how good it is, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import TaskResult


def summary_section(subject: Subject, results: Sequence[TaskResult]) -> str:
    """The summaries and the advice of all tasks, and their metrics."""
    found = [sentence for result in results for sentence in result.summary]
    to_do = [sentence for result in results for sentence in result.advice]
    parts = ["## Summary", _bullets([_trained(subject), *found])]
    if to_do:
        parts += ["What to do next:", _bullets(to_do)]
    if rows := [row for result in results for row in _rows(result)]:
        parts.append(table(("Metric", "Value (interval of 95%)"), rows))
    return "\n\n".join(parts)


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _trained(subject: Subject) -> str:
    """What was trained, for how long, and on what."""
    position, config = subject.position, subject.config
    parameters = sum(p.numel() for p in subject.model.parameters())
    steps = f"{position.step:,} steps"
    if position.step < subject.last_step:
        steps = f"{position.step:,} of {subject.last_step:,} steps"
    tokens = position.samples_seen * config.packing.context_length
    return (
        f"An Infini-Llama of {parameters:,} parameters (memory: {subject.model.config.memory}, "
        f"objective: {config.training.objective}), trained for {steps}, {tokens:,} tokens of "
        f"`{subject.manifest.name}`."
    )


def _rows(result: TaskResult) -> Iterator[tuple[str, str]]:
    for name, value in result.metrics.items():
        shown = f"{value:,.4f}"
        if name in result.intervals:
            low, high = result.intervals[name]
            shown += f" ({low:,.4f} to {high:,.4f})"
        yield f"`{name.removeprefix('evaluation/')}`", shown
