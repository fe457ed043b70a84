"""Retrieval of several needles from one haystack, by length and depth."""

from __future__ import annotations

from infini_model.evaluation.retrieval.findings import findings
from infini_model.evaluation.retrieval.grid import check, sequences
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, TaskResult


class Task(EvaluationTask):
    """Hides numbers of different people in a long context and asks for each of them."""

    title = "Several needles"

    def sequences(self, subject: Subject) -> int:
        """All haystacks."""
        settings = subject.config.evaluation.needles
        return sequences(subject, settings, settings.needles)

    def check(self, subject: Subject) -> None:
        """Refuse lengths that are too short, and a filler that is missing."""
        settings = subject.config.evaluation.needles
        check(subject, "needles", settings, settings.needles)

    def run(self, subject: Subject) -> TaskResult:
        """Measure with the settings in `evaluation.needles` and the run's seed."""
        settings = subject.config.evaluation.needles
        return findings(subject, "needles", self.title, settings, settings.needles)
