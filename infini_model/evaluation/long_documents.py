"""Long documents, scored with the memory and with it knocked out, segment by segment.

Each sequence is two documents, one after the other, from a segment border each. It is scored twice:
with a memory that is never emptied, and with one that is emptied before every segment. So one pass
over the same tokens measures a document three ways: as the first of a sequence the memory is empty
at its start, as the second it carries over what came before, and it is knocked out in both places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from infini_model.config.evaluation import LossByPositionConfig
from infini_model.data.loading.stream import TokenStream, open_split
from infini_model.data.loading.windows import Batch, sample_windows
from infini_model.data.manifest import Split
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.subject import Subject

SPLITS: tuple[Split, ...] = ("test", "validation")
# An interval over documents needs two of them, and so does a memory that is carried over.
FEWEST = 2


class LongDocuments(NamedTuple):
    """A sample of the documents of a split that have at least `segments` whole segments.

    `starts` int64 [documents] is where they start in `stream`; `found` is the number of all that
    are long enough.
    """

    split: Split
    stream: TokenStream
    starts: np.ndarray
    found: int
    segments: int
    segment_length: int

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The segments of these documents and the token after each: [B, segments, L + 1]."""
        length = self.segments * self.segment_length
        tokens = self.stream.gather(self.starts[numbers], length + 1).astype(np.int64)
        rows = sliding_window_view(tokens, self.segment_length + 1, axis=1)
        return rows[:, :: self.segment_length]


class SegmentRange(NamedTuple):
    """Segments of a document, counted from 1, both inclusive."""

    first: int
    last: int


class Measurement(NamedTuple):
    """Loss sums in nats and their counts, by document and segment: float64 [documents, segments].

    Attributes:
        counts: Number of targets.
        losses: `fresh`, with the memory emptied at the start of the document only; unless the model
            has no memory also `carried`, over from another document, and `knocked_out`.
        gains: What the memory takes off the loss, `fresh` and `carried`, if there is one. Of a
            diffusion model both sides of a difference have the same noise, as have no two `losses`.
    """

    counts: np.ndarray
    losses: dict[str, np.ndarray]
    gains: dict[str, np.ndarray]

    def over(self, sums: np.ndarray, reaches: Sequence[SegmentRange]) -> list[Interval]:
        """`sums`, one of `losses` or `gains`, per target in each of `reaches`, over documents."""
        numbers = np.arange(1, sums.shape[1] + 1)
        inside = np.array([(first <= numbers) & (numbers <= last) for first, last in reaches]).T
        return bootstrap(sums @ inside, self.counts @ inside)


def segments_measured(subject: Subject) -> int:
    """Segments of each document that the settings ask for; by default those of a window."""
    segments = subject.config.evaluation.loss_by_position.segments
    whole = subject.config.packing.context_length // subject.model.config.segment_length
    return whole if segments is None else segments


def find_long_documents(subject: Subject) -> LongDocuments | int:
    """A sample of long documents of the first split that has some, or the length of the longest.

    The sample depends on nothing but the dataset, the segments and `max_documents`.
    """
    length, segments = subject.model.config.segment_length, segments_measured(subject)
    longest = 0
    for split in SPLITS:
        if not subject.manifest.splits[split].tokens:
            continue
        stream = open_split(subject.dataset_dir, split)
        starts, most = _starts_of_long(stream, segments * length + 1)
        longest = max(longest, most)
        if len(starts) >= FEWEST:
            limit = subject.config.evaluation.loss_by_position.max_documents
            chosen = starts[sample_windows(len(starts), limit)]
            return LongDocuments(split, stream, chosen, len(starts), segments, length)
    return longest


def _starts_of_long(stream: TokenStream, tokens: int) -> tuple[np.ndarray, int]:
    """Where documents of at least `tokens` tokens start, int64, and the length of the longest."""
    found, start, longest = [np.zeros(0, np.int64)], 0, 0
    for lengths in stream.lengths():
        ends = start + np.cumsum(lengths, dtype=np.int64)
        found.append((ends - lengths)[lengths >= tokens])
        start, longest = int(ends[-1]), max(longest, int(lengths.max()))
    return np.concatenate(found), longest


def measure(subject: Subject, documents: LongDocuments) -> Measurement:
    """Score the documents; finished batches are kept, so that an interrupted one resumes."""
    settings = LossByPositionConfig(
        segments=documents.segments, max_documents=len(documents.starts)
    )
    cells = subject.cells("loss_by_position", settings)
    parts = []
    for numbers in _batches(subject, documents):
        name = f"{documents.split}-{numbers[0]}-{numbers[-1]}"
        parts.append(cells.measured(name, lambda: _score(subject, documents, numbers)))  # noqa: B023
        subject.on_windows(len(numbers))
    kept, emptied, counts = (np.concatenate(each) for each in zip(*parts, strict=True))
    if subject.model.config.memory == "none":
        return Measurement(counts, {"fresh": kept}, {})
    first, second = (np.s_[:, : documents.segments], np.s_[:, documents.segments :])
    # The second document of a sequence is the first one of the next.
    carried, knocked_out = (np.roll(each[second], 1, axis=0) for each in (kept, emptied))
    losses = {"fresh": kept[first], "carried": carried, "knocked_out": emptied[first]}
    gains = {"fresh": emptied[first] - kept[first], "carried": knocked_out - carried}
    return Measurement(counts[first], losses, gains)


def _batches(subject: Subject, documents: LongDocuments) -> Iterator[np.ndarray]:
    """Numbers of documents, as many as two of each fill the windows of a batch."""
    tokens = subject.config.evaluation.batch_size * subject.config.packing.context_length
    size = max(1, tokens // (2 * documents.segments * documents.segment_length))
    every = np.arange(len(documents.starts))
    yield from (every[start : start + size] for start in range(0, len(every), size))


def _score(
    subject: Subject, documents: LongDocuments, numbers: np.ndarray
) -> list[list[list[float]]]:
    """Loss sums with the memory and without, and counts, by segment: three times [B, segments].

    The segments are those of each document and of the next one, which only a memory tells apart.
    """
    rows = documents.rows(numbers)
    if has_memory := subject.model.config.memory != "none":
        following = documents.rows((numbers + 1) % len(documents.starts))
        rows = np.concatenate([rows, following], axis=1)
    keys = torch.from_numpy(documents.starts[numbers])
    batch = Batch(torch.from_numpy(np.ascontiguousarray(rows)), None, None, keys)
    kept, counts = subject.losses(batch)
    emptied = subject.losses(batch, empty_memory=True)[0] if has_memory else kept
    shape = (*rows.shape[:2], documents.segment_length)
    return [each.reshape(shape).sum(2).tolist() for each in (kept, emptied, counts)]
