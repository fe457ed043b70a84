"""Loss by position, and what memory and window contribute: along long documents and over windows.

Each document is scored from its start, always with the same weights: whole, and once with each part
of the attention knocked out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from infini_model.data.loading.stream import TokenStream, open_split
from infini_model.data.loading.windows import Batch, sample_windows
from infini_model.data.manifest import Split
from infini_model.evaluation.context import HELD_OUT, EvalContext, Pass, kept_or_computed
from infini_model.evaluation.plots import plot_by_position
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.model.inspection import PLACES, effect
from infini_model.model.layers import Part
from infini_model.runtime.errors import CheckpointError

# Segments from which on the loss is summed up: the first with a memory, and one far from the start.
FROM = (2, 8)


class LossByPosition(EvaluationTask):
    """The loss along documents and windows, and what each part of the attention gains."""

    title = "Loss by position"

    def work(self, context: EvalContext) -> dict[Pass | str, int]:
        """The long documents, and the windows with all parts of the attention and without each."""
        work: dict[Pass | str, int] = {x: context.sample_size(x.split) for x in _passes(context)}
        found = find_long_documents(context)
        if isinstance(found, LongDocuments):
            work[self.title] = len(found.starts)
        return work

    def run(self, context: EvalContext) -> TaskResult:
        """Measure long documents, if there are some, and the windows, which say less."""
        found, windows = find_long_documents(context), _of_windows(context)
        result = windows if isinstance(found, str) else _of_documents(context, found)
        sections = [found if isinstance(found, str) else result.section, *windows.summary]
        metrics = result.metrics | windows.metrics
        return result.model_copy(update={"metrics": metrics, "section": "\n\n".join(sections)})


def parts_of(context: EvalContext) -> tuple[Part, ...]:
    """The parts of the model's attention beside a token's own segment."""
    shape = context.model.config
    has: dict[Part, bool] = {"memory": shape.memory != "none"}
    has["window"] = shape.window_segments + shape.window_sinks > 0
    return tuple(part for part, is_there in has.items() if is_there)


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


class Measurement(NamedTuple):
    """Loss sums in nats and their counts, by document and segment: float64 [documents, segments].

    Attributes:
        counts: Number of targets.
        whole: Losses with all parts of the attention.
        without: With each part knocked out, and the same noise of a diffusion model.
    """

    counts: np.ndarray
    whole: np.ndarray
    without: dict[Part, np.ndarray]

    def over(self, sums: np.ndarray, ranges: Sequence[tuple[int, int]]) -> list[Interval]:
        """Losses, or differences between them, per target, over documents.

        Each of `ranges` is the first and the last segment to count, from 1.
        """
        numbers = np.arange(1, sums.shape[1] + 1)
        inside = np.array([(first <= numbers) & (numbers <= last) for first, last in ranges]).T
        return bootstrap(sums @ inside, self.counts @ inside)


def find_long_documents(context: EvalContext) -> LongDocuments | str:
    """A sample of long documents of the first split that has some, or a sentence on why not.

    The sample depends on nothing but the dataset, the segments and `max_documents`.
    """
    shape, settings = context.model.config, context.config.evaluation.loss_by_position
    # By default those of a window.
    segments = settings.segments or context.config.packing.context_length // shape.segment_length
    if shape.bidirectional and not shape.has_past:
        return "The model sees a window as a whole and has no memory."
    if context.manifest.conversations:
        return "The documents are conversations, which are not scored along their length."
    if segments < 2:
        return (
            "A window has only one segment, so nothing is read from a memory; "
            "`evaluation.loss_by_position.segments` scores longer documents."
        )
    needed, longest = segments * shape.segment_length, 0
    for split in reversed(HELD_OUT):
        if not context.manifest.splits[split].tokens:
            continue
        stream = open_split(context.dataset_dir, split)
        found, start = [np.zeros(0, np.int64)], 0
        for lengths in stream.lengths():
            ends = start + np.cumsum(lengths, dtype=np.int64)
            found.append((ends - lengths)[lengths > needed])
            start, longest = int(ends[-1]), max(longest, int(lengths.max()))
        starts = np.concatenate(found)
        if len(starts) >= 2:  # an interval over documents needs two of them
            chosen = starts[sample_windows(len(starts), settings.max_documents)]
            return LongDocuments(split, stream, chosen, len(starts), segments, shape.segment_length)
    return (
        "The loss along documents was not measured: no held-out split has two of more than "
        f"{needed:,} tokens ({segments:,} segments). The longest document has {longest:,} tokens; "
        "`evaluation.loss_by_position.segments` takes shorter ones."
    )


def measure(context: EvalContext, documents: LongDocuments) -> Measurement:
    """Score the documents; finished batches are kept, so that an interrupted one resumes."""
    settings = {"segments": documents.segments, "max_documents": len(documents.starts)}
    folder = context.kept_folder("loss_by_position", settings)
    # As many documents as fill the windows of a batch.
    tokens = context.config.evaluation.batch_size * context.config.packing.context_length
    size = max(1, tokens // (documents.segments * documents.segment_length))
    parts = []
    for start in range(0, len(documents.starts), size):
        numbers = np.arange(start, min(start + size, len(documents.starts)))
        name = f"{documents.split}-{numbers[0]}-{numbers[-1]}"
        score = partial(_score, context, documents, numbers)
        parts.append(kept_or_computed(folder, name, score))
        context.on_windows(len(numbers))
    counts, whole, *without = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Measurement(counts, whole, dict(zip(parts_of(context), without, strict=True)))


def _score(
    context: EvalContext, documents: LongDocuments, numbers: np.ndarray
) -> list[list[list[float]]]:
    """The fields of a `Measurement` of these documents, one by one: [B, segments] each."""
    starts, length = documents.starts[numbers], documents.segment_length
    tokens = documents.stream.gather(starts, documents.segments * length + 1).astype(np.int64)
    # Each segment, and the token after it: [B, segments, L + 1].
    rows = torch.from_numpy(tokens).unfold(1, length + 1, length).contiguous()
    batch = Batch(rows, None, None, torch.from_numpy(starts))
    whole, counts = context.scorer.losses(batch)
    found = [counts, whole, *(context.scorer.losses(batch, part)[0] for part in parts_of(context))]
    return [each.reshape(*rows.shape[:2], length).sum(2).tolist() for each in found]


def _passes(context: EvalContext) -> list[Pass]:
    """With all parts of the attention, and without each, if that makes a difference.

    They are over the first held-out split that has windows.
    """
    one_segment = context.config.packing.context_length == context.model.config.segment_length
    split = next((split for split in HELD_OUT if context.sample_size(split)), None)
    if split is None or one_segment or not parts_of(context):
        return []
    return [Pass(split, part) for part in (None, *parts_of(context))]


def _of_windows(context: EvalContext) -> TaskResult:
    """Windows, with all parts of the attention and with each knocked out; no section."""
    metrics, notes, to_do = dict[str, float](), list[str](), list[str]()
    for split, part in _passes(context):
        whole, loss = context.score(split).loss, context.score(split, part).loss
        if part is None or whole is None or loss is None:
            continue
        metrics[f"evaluation/{split}_loss_without_{part}"] = loss
        gain = round(loss - whole, PLACES)
        notes.append(
            f"Knocking the {part} out changes the loss over the windows of the {split} split by "
            f"{gain:+z.{PLACES}f} nats per token, to {loss:.{PLACES}f}, with the same weights."
        )
        if part == "memory":
            to_do = advice(context, is_used=gain > 0)
    return TaskResult(section="", metrics=metrics, summary=notes, advice=to_do)


def _of_documents(context: EvalContext, documents: LongDocuments) -> TaskResult:
    """Long documents, with all parts of the attention and with each knocked out."""
    measured = measure(context, documents)
    knocked_out = {f"{part} knocked out": sums for part, sums in measured.without.items()}
    sums = {"nothing knocked out": measured.whole, **knocked_out}
    if not np.isfinite([*sums.values()]).all():
        raise CheckpointError(f"{context.name}: the loss of a document is not finite")
    segments, split = documents.segments, documents.split
    every = [(number, number) for number in range(1, segments + 1)]
    far = [(start, segments) for start in FROM if start <= segments]
    where = f"on {len(documents.starts):,} documents of the {split} split"
    named = {"loss": measured.over(measured.whole, far)}
    summary, to_do, by_segment = list[str](), list[str](), list[Interval]()
    for part, without in measured.without.items():
        gained = without - measured.whole
        gains = named[f"{part}_gain"] = measured.over(gained, far)
        summary.append(verdict(gains, where, part))
        if part == "memory":
            by_segment = measured.over(gained, every)
            to_do = advice(context, is_used=effect(*gains[0]) > 0)
    if "memory" not in measured.without:
        loss = named["loss"][0]
        summary[:0] = [
            f"The model has no memory: from the 2nd segment on its loss is {loss} {where}."
        ]
    positions = [float(number) for number, _ in every]
    losses = {name: each.sum(0) / measured.counts.sum(0) for name, each in sums.items()}
    path = plot_by_position(
        {name: (positions, each.tolist()) for name, each in losses.items()},
        by_segment,
        f"segment of the document ({documents.segment_length:,} tokens each)",
        context.plots_dir / "loss_by_position.png",
    )
    chosen, found = len(documents.starts), documents.found
    which = "all that are" if chosen == found else f"a fixed sample of the {found:,} that are"
    return TaskResult.of(
        {
            f"evaluation/{split}_{name}_from_segment_{first}": interval
            for name, intervals in named.items()
            for (first, _), interval in zip(far, intervals, strict=True)
        },
        section=(
            f"The first {segments:,} segments of {documents.segment_length:,} tokens of {chosen:,} "
            f"documents of the {split} split, {which} long enough."
        ),
        summary=summary,
        advice=to_do,
        pictures={"Loss and gain of the memory by segment": path},
    )


def verdict(gains: Sequence[Interval], where: str, part: Part = "memory") -> str:
    """A verdict on whether the weights use a part, from its `gains` beyond each of `FROM`."""
    near, *rest = gains
    gained = effect(*near)
    found = "is used.**" if gained > 0 else "hurts.**"
    if gained == 0:
        found = "is not used**, as the interval includes 0."
    further = "".join(f", and from the {FROM[1]}th on {gain}" for gain in rest)
    return (
        f"**The {part} {found} Knocking it out changes the loss by {near} nats per token from "
        f"the {FROM[0]}nd segment on{further}, {where}."
    )


def advice(context: EvalContext, *, is_used: bool) -> list[str]:
    """How to make the memory learn if it is not used, and how to find out what it is worth."""
    found = []
    if not is_used:
        found.append(
            "What makes a memory learn, see docs/memory.md: documents and windows of many segments "
            "(`packing.context_length`), `packing.mode=aligned`, which empties the memory at each "
            "document, `model.memory_key_shift=true`, and more steps."
        )
    if context.config.training.objective == "causal":
        file = shlex.quote(str(context.run_dir / "config.yaml"))
        name = context.run_dir.name
        ours, control = shlex.quote(name), shlex.quote(f"{name}-no-memory")
        found.append(
            "Knocking the memory out shows what these weights rely on, not what a memory is worth: "
            "for that, compare with a control that is trained without one on the same tokens, "
            f"`infini run --config {file} model.memory=none run.name={control}`, then "
            f"`infini compare {control} {ours}`."
        )
    return found
