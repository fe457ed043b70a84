"""Loss by position, and what the memory contributes: along long documents and over the windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from infini_model.data.manifest import Split
from infini_model.evaluation.long_documents import (
    FEWEST,
    LongDocuments,
    Measurement,
    SegmentRange,
    find_long_documents,
    measure,
    segments_measured,
)
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.reporting.memory import advice, verdict
from infini_model.evaluation.reporting.plots import Series, plot_by_position
from infini_model.evaluation.score import Score
from infini_model.evaluation.statistics import Interval
from infini_model.evaluation.subject import HELD_OUT, Pass, Subject
from infini_model.evaluation.tasks.task import EvaluationTask, Picture, TaskResult
from infini_model.model.inspection.findings import PLACES, effect
from infini_model.runtime.errors import CheckpointError

# Segments from which on the loss is summed up: the first with a memory, and one far from the start.
FROM = (2, 8)
WAYS = {
    "fresh": "emptied at documents",
    "carried": "carried over",
    "knocked_out": "knocked out",
}
METRICS = {"fresh": "memory_gain", "carried": "memory_gain_carried_over"}
PICTURE = "loss_by_position.png"


class Task(EvaluationTask):
    """How the loss falls along documents and windows, and how much of that is due to the memory."""

    title = "Loss by position"

    def scores(self, subject: Subject) -> set[Pass]:
        """The windows of a split, with the memory and with it emptied."""
        split = _compared(subject)
        return {Pass(split), Pass(split, empty_memory=True)} if split else set()

    def sequences(self, subject: Subject) -> int:
        """The long documents."""
        found = _find(subject)
        return len(found.starts) if isinstance(found, LongDocuments) else 0

    def run(self, subject: Subject) -> TaskResult:
        """Measure the windows and, if there are some, long documents, which say more."""
        windows, found = _score_windows(subject), _find(subject)
        if isinstance(found, LongDocuments):
            result = _of_documents(subject, found)
        else:
            result = (
                TaskResult(section=found) if windows is None else _alone(subject, windows, found)
            )
        if windows is None:
            return result
        name = f"evaluation/{windows.split}_loss_without_memory"
        scores = {"kept": windows.kept.model_dump(), "emptied": windows.emptied.model_dump()}
        changes = {
            "metrics": result.metrics | {name: windows.emptied.loss},
            "section": f"{result.section}\n\n{windows.note}",
            "details": result.details | {"windows": scores},
        }
        return result.model_copy(update=changes)


def _find(subject: Subject) -> LongDocuments | str:
    """The documents to score, or a sentence that says why there are none."""
    shape, segments = subject.model.config, segments_measured(subject)
    if shape.bidirectional and shape.memory == "none":
        return "The model sees a window as a whole and has no memory."
    if subject.manifest.pairs:
        return "The documents are prompts and answers, which are not scored along their length."
    if segments < FEWEST:
        return (
            "A window has only one segment, so nothing is read from a memory; "
            "`evaluation.loss_by_position.segments` scores longer documents."
        )
    found = find_long_documents(subject)
    if isinstance(found, LongDocuments):
        return found
    return (
        "The loss along documents was not measured: no held-out split has two of more than "
        f"{segments * shape.segment_length:,} tokens ({segments:,} segments). The longest document "
        f"has {found:,} tokens; `evaluation.loss_by_position.segments` takes shorter ones."
    )


def _compared(subject: Subject) -> Split | None:
    """The split whose windows are scored twice; None if an empty memory makes no difference."""
    one_segment = subject.config.packing.context_length == subject.model.config.segment_length
    if subject.model.config.memory == "none" or one_segment:
        return None
    return next((split for split in HELD_OUT if subject.sample_size(split)), None)


class WindowScores(NamedTuple):
    """The windows of a split, as in training, scored with the memory and with it emptied."""

    split: Split
    kept: Score
    emptied: Score

    @property
    def gain(self) -> float:
        """What the memory takes off the loss, in nats per token, without an interval."""
        gain = (self.emptied.loss or 0.0) - (self.kept.loss or 0.0)
        return effect(gain, gain, gain)

    @property
    def note(self) -> str:
        """The gain in a sentence."""
        found = "the same to four places as"
        if self.gain:
            word = "lower" if self.gain > 0 else "higher"
            found = f"{abs(self.gain):.{PLACES}f} nats per token {word} than"
        return (
            f"With the memory the loss over the windows of the {self.split} split is {found} with "
            f"the memory emptied before every segment ({self.emptied.loss:.{PLACES}f}), with the "
            "same weights."
        )


def _score_windows(subject: Subject) -> WindowScores | None:
    """None if a split has no targets, or an empty memory makes no difference."""
    split = _compared(subject)
    if split is None:
        return None
    kept, emptied = subject.score(split), subject.score(split, empty_memory=True)
    return None if kept.loss is None else WindowScores(split, kept, emptied)


def _alone(subject: Subject, windows: WindowScores, reason: str) -> TaskResult:
    """What the windows say without long documents, of which there are none for a `reason`."""
    path = plot_by_position(
        {"memory kept": _by_segment(windows.kept), "knocked out": _by_segment(windows.emptied)},
        {},
        f"segment of the window ({subject.model.config.segment_length:,} tokens each)",
        subject.plots_dir / PICTURE,
    )
    return TaskResult(
        section=reason,
        summary=[windows.note],
        advice=advice(subject, is_used=windows.gain > 0),
        pictures=[Picture(path=path, caption="Loss by segment of the window")],
    )


def _by_segment(scored: Score) -> Series:
    """Segments, counted from 1, and their losses; segments without tokens are left out."""
    points = [(i + 1.0, x) for i, x in enumerate(scored.loss_by_segment) if x is not None]
    return [number for number, _ in points], [loss for _, loss in points]


def _of_documents(subject: Subject, documents: LongDocuments) -> TaskResult:
    """Long documents with the memory emptied at their start, carried over, and knocked out."""
    measured = measure(subject, documents)
    if not all(np.isfinite(sums).all() for sums in measured.losses.values()):
        raise CheckpointError(f"{subject.checkpoint}: the loss of a document is not finite")
    every = [SegmentRange(number, number) for number in range(1, documents.segments + 1)]
    far = [SegmentRange(start, documents.segments) for start in FROM if start <= documents.segments]
    losses = {way: measured.over(sums, every) for way, sums in measured.losses.items()}
    gains = {way: measured.over(sums, every) for way, sums in measured.gains.items()}
    labels = {way: f"memory {name}" for way, name in WAYS.items()} if gains else {"fresh": "loss"}
    path = plot_by_position(
        {labels[way]: _points(intervals) for way, intervals in losses.items()},
        {labels[way]: intervals for way, intervals in gains.items()},
        f"segment of the document ({documents.segment_length:,} tokens each)",
        subject.plots_dir / PICTURE,
    )
    found = _from(measured, far, documents.split)
    summary, to_do = _found(subject, documents, measured, far)
    return TaskResult(
        metrics={name: interval.estimate for name, interval in found.items()},
        intervals={name: (interval.low, interval.high) for name, interval in found.items()},
        section=f"{_method(documents, measured)}\n\n{_table(documents, measured, far)}",
        summary=[summary],
        advice=to_do,
        pictures=[Picture(path=path, caption="Loss and gain of the memory by segment")],
        details={
            "documents": len(documents.starts),
            "long_documents": documents.found,
            "loss": losses,
            "memory_gain": gains,
        },
    )


def _points(intervals: Sequence[Interval]) -> Series:
    """A curve over segments, counted from 1."""
    return [i + 1.0 for i in range(len(intervals))], [each.estimate for each in intervals]


def _from(measured: Measurement, far: Sequence[SegmentRange], split: Split) -> dict[str, Interval]:
    """The metrics: loss and gains from some segments on."""
    named = {"loss": measured.losses["fresh"]}
    named |= {METRICS[way]: sums for way, sums in measured.gains.items()}
    return {
        f"evaluation/{split}_{name}_from_segment_{reach.first}": interval
        for name, sums in named.items()
        for reach, interval in zip(far, measured.over(sums, far), strict=True)
    }


def _found(
    subject: Subject, documents: LongDocuments, measured: Measurement, far: Sequence[SegmentRange]
) -> tuple[str, list[str]]:
    """Summary and advice."""
    where = f"on {len(documents.starts):,} documents of the {documents.split} split"
    if not measured.gains:
        loss = measured.over(measured.losses["fresh"], far)[0]
        return f"The model has no memory: from the 2nd segment on its loss is {loss} {where}.", []
    gains = measured.over(measured.gains["fresh"], far)
    by_start = {reach.first: gain for reach, gain in zip(far, gains, strict=True)}
    return verdict(by_start, where), advice(subject, is_used=effect(*gains[0]) > 0)


def _method(documents: LongDocuments, measured: Measurement) -> str:
    """What was scored."""
    chosen, found = len(documents.starts), documents.found
    which = "all that are" if chosen == found else f"a fixed sample of the {found:,} that are"
    scored = (
        f"The first {documents.segments:,} segments of {documents.segment_length:,} tokens of "
        f"{chosen:,} documents of the {documents.split} split, {which} long enough."
    )
    if not measured.gains:
        return scored
    return (
        f"{scored} The weights are the same throughout: the memory is emptied at the start of each "
        "document, or carries over another document, or is knocked out by emptying it before every "
        "segment. A gain is how much lower the loss is than with the memory knocked out, in nats "
        "per token, with an interval of 95% over documents."
    )


def _table(documents: LongDocuments, measured: Measurement, far: Sequence[SegmentRange]) -> str:
    """Perplexity each way, and what the memory gains, by position."""
    ways = [f"Perplexity, {WAYS[way]}" for way in measured.losses]
    gained = [f"Gain, {WAYS[way]}" for way in measured.gains]
    header = ["Tokens", *(ways if gained else ["Perplexity"]), *gained]
    growing, length = _growing(documents.segments), documents.segment_length
    reaches = [*growing, *far]
    names = [f"{(reach.first - 1) * length + 1:,} to {reach.last * length:,}" for reach in growing]
    names += [f"from segment {reach.first}" for reach in far]
    perplexities = [
        [f"{math.exp(min(each.estimate, 700.0)):,.3f}" for each in measured.over(sums, reaches)]
        for sums in measured.losses.values()
    ]
    gains = [[str(each) for each in measured.over(g, reaches)] for g in measured.gains.values()]
    return table(header, zip(names, *perplexities, *gains, strict=True))


def _growing(segments: int) -> list[SegmentRange]:
    """The 1st segment, the 2nd, the 3rd and 4th, the 5th to 8th, and so on."""
    reaches = [SegmentRange(1, 1)]
    while (last := reaches[-1].last) < segments:
        reaches.append(SegmentRange(last + 1, min(2 * last, segments)))
    return reaches
