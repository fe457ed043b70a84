"""The answers of a model over a grid of length and depth."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from infini_model.config.evaluation import PasskeyConfig
from infini_model.evaluation.retrieval.asking import ask
from infini_model.evaluation.retrieval.trials import Trial, Trials, haystacks_per_trial
from infini_model.evaluation.subject import Subject
from infini_model.model.llama import InfiniLlama


class Counts(NamedTuple):
    """Sums over answers, by depth: [D] int64 each, in the order of the settings' depths.

    Attributes:
        answers: Answers.
        exact: Answers of which every token is right.
        tokens: Tokens of the answers.
        right: Those of them that are right.
    """

    answers: np.ndarray
    exact: np.ndarray
    tokens: np.ndarray
    right: np.ndarray


def count(model: InfiniLlama, trial: Trial, depths: int, rows: int) -> Counts:
    """Ask for every needle of a trial, reading at most `rows` haystacks at once."""
    right, tokens = (found.flatten().numpy() for found in ask(model, trial.haystacks, rows))
    sums = (np.ones_like(right), right == tokens, tokens, right)
    places = trial.depths.flatten()
    return Counts(*(np.bincount(places, each, depths).astype(np.int64) for each in sums))


def check(subject: Subject, task: str, settings: PasskeyConfig, needles: int) -> None:
    """Raise `UserError` if a length is too short, or if there are no documents for the filler."""
    if not subject.model.config.bidirectional:
        Trials(subject, task, settings, needles).draw(min(settings.lengths), 0)


def measure(
    subject: Subject, task: str, settings: PasskeyConfig, needles: int
) -> dict[int, Counts]:
    """The sums over all trials, by length in multiples of the trained context, in ascending order.

    Finished trials are kept. Reports the haystacks to `subject.on_windows`.
    """
    trials, lengths = Trials(subject, task, settings, needles), sorted(set(settings.lengths))
    # One more length, or trial, costs only itself.
    cells = subject.cells(task, settings.updated(lengths=[], trials=0))
    rows = subject.config.evaluation.batch_size

    def counted(length: int, number: int) -> list[list[int]]:
        trial = trials.draw(length, number)
        found = count(subject.model, trial, len(settings.depths), rows)
        return [each.tolist() for each in found]

    found = {}
    for length in lengths:
        every = []
        for number in range(settings.trials):
            every.append(cells.measured(f"{length}x-{number}", partial(counted, length, number)))
            subject.on_windows(haystacks_per_trial(settings, needles))
        found[length] = Counts(*np.sum(every, axis=0))
    return found


def sequences(subject: Subject, settings: PasskeyConfig, needles: int) -> int:
    """Number of haystacks of all trials; none for a bidirectional model, which is not asked."""
    if subject.model.config.bidirectional:
        return 0
    return len(set(settings.lengths)) * settings.trials * haystacks_per_trial(settings, needles)
