"""Retrieval of a pass key by length and depth."""

from __future__ import annotations

from infini_model.evaluation.retrieval.findings import findings
from infini_model.evaluation.retrieval.grid import check, sequences
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, TaskResult


class Task(EvaluationTask):
    """Hides a number in a long context and asks for it at the end (arXiv 2305.16300)."""

    title = "Pass keys"

    def sequences(self, subject: Subject) -> int:
        """All haystacks."""
        return sequences(subject, subject.config.evaluation.passkey, 1)

    def check(self, subject: Subject) -> None:
        """Refuse lengths that are too short, and a filler that is missing."""
        check(subject, "passkey", subject.config.evaluation.passkey, 1)

    def run(self, subject: Subject) -> TaskResult:
        """Measure with the settings in `evaluation.passkey` and the run's seed."""
        return findings(subject, "passkey", self.title, subject.config.evaluation.passkey, 1)
