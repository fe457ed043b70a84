"""Loss by position, and what memory and window contribute: along long documents and over windows.

Each document is scored from its start, always with the same weights: whole, and once with each part
of the attention knocked out.
"""

from __future__ import annotations

import math
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
from infini_model.evaluation.pages import table
from infini_model.evaluation.plots import plot_by_position
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.model.inspection import PLACES, effect
from infini_model.model.layers import Part
from infini_model.runtime.errors import CheckpointError

# An interval over documents needs two of them.
FEWEST = 2
# Segments from which on the loss is summed up: the first with a memory, and one far from the start.
FROM = (2, 8)
WHOLE = "nothing knocked out"
# The first and the last segment of a range, counted from 1.
Segments = tuple[int, int]


class LossByPosition(EvaluationTask):
    """The loss along documents and windows, and what each part of the attention gains."""

    title = "Loss by position"

    def work(self, context: EvalContext) -> dict[Pass | str, int]:
        """The long documents, and the windows with all parts of the attention and without each."""
        found, split = find_long_documents(context), _compared(context)
        work = dict[Pass | str, int]()
        if isinstance(found, LongDocuments):
            work[self.title] = len(found.starts)
        if split is not None:
            for part in (None, *parts_of(context)):
                work[Pass(split, part)] = context.sample_size(split)
        return work

    def run(self, context: EvalContext) -> TaskResult:
        """Measure long documents, if there are some, and the windows, which say less."""
        found = find_long_documents(context)
        if isinstance(found, LongDocuments):
            result = _of_documents(context, found)
        else:
            result = TaskResult(section=found)
        split = _compared(context)
        if split is None:
            return result
        kept = context.score(split)
        without = {part: context.score(split, part) for part in parts_of(context)}
        metrics, notes, is_used = dict(result.metrics), list[str](), False
        for part, score in without.items():
            if kept.loss is None or score.loss is None:
                return result
            gain = score.loss - kept.loss
            gain = effect(gain, gain, gain)
            word = "lower" if gain > 0 else "higher"
            size = f"{abs(gain):.{PLACES}f} nats per token {word} than"
            notes.append(
                f"With the {part} the loss over the windows of the {split} split is "
                f"{size if gain else 'the same to four places as'} with the {part} knocked out "
                f"({score.loss:.{PLACES}f}), with the same weights."
            )
            metrics[f"evaluation/{split}_loss_without_{part}"] = score.loss
            is_used |= part == "memory" and gain > 0
        section = "\n\n".join([result.section, *notes])
        changes: dict[str, object] = {"metrics": metrics, "section": section}
        if isinstance(found, str):
            changes |= {"summary": notes, "advice": advice(context, is_used=is_used)}
        return result.model_copy(update=changes)


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

    def over(self, sums: np.ndarray, ranges: Sequence[Segments]) -> list[Interval]:
        """Losses, or differences between them, per target in each of `ranges`, over documents."""
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
        if len(starts) >= FEWEST:
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


def _compared(context: EvalContext) -> Split | None:
    """The split whose windows are scored without each part; None if that makes no difference."""
    one_segment = context.config.packing.context_length == context.model.config.segment_length
    if not parts_of(context) or one_segment:
        return None
    return next((split for split in HELD_OUT if context.sample_size(split)), None)


def _of_documents(context: EvalContext, documents: LongDocuments) -> TaskResult:
    """Long documents, with all parts of the attention and with each knocked out."""
    measured = measure(context, documents)
    knocked_out = {f"{part} knocked out": sums for part, sums in measured.without.items()}
    sums = {WHOLE: measured.whole, **knocked_out}
    if not all(np.isfinite(each).all() for each in sums.values()):
        raise CheckpointError(f"{context.checkpoint}: the loss of a document is not finite")
    segments, split = documents.segments, documents.split
    every = [(number, number) for number in range(1, segments + 1)]
    far = [(start, segments) for start in FROM if start <= segments]
    named, by_segment = {"loss": measured.over(measured.whole, far)}, dict[str, list[Interval]]()
    where, summary = f"on {len(documents.starts):,} documents of the {split} split", list[str]()
    for part, without in measured.without.items():
        gained = without - measured.whole
        by_segment[part], named[f"{part}_gain"] = (measured.over(gained, x) for x in (every, far))
        gains = dict(zip(FROM, named[f"{part}_gain"], strict=False))
        summary.append(verdict(gains, where, part))
    to_do = list[str]()
    if "memory" in measured.without:
        to_do = advice(context, is_used=effect(*named["memory_gain"][0]) > 0)
    else:
        loss = named["loss"][0]
        summary[:0] = [
            f"The model has no memory: from the 2nd segment on its loss is {loss} {where}."
        ]
    losses = {label: measured.over(each, every) for label, each in sums.items()}
    positions = [float(number) for number, _ in every]
    path = plot_by_position(
        {label: (positions, [x.estimate for x in each]) for label, each in losses.items()},
        by_segment.get("memory", []),
        f"segment of the document ({documents.segment_length:,} tokens each)",
        context.plots_dir / "loss_by_position.png",
    )
    found = {
        f"evaluation/{split}_{name}_from_segment_{first}": interval
        for name, intervals in named.items()
        for (first, _), interval in zip(far, intervals, strict=True)
    }
    return TaskResult.of(
        found,
        section=f"{_method(documents, measured)}\n\n{_table(documents, measured, far)}",
        summary=summary,
        advice=to_do,
        pictures={"Loss and gain of the memory by segment": path},
    )


def _method(documents: LongDocuments, measured: Measurement) -> str:
    """What was scored."""
    chosen, found = len(documents.starts), documents.found
    which = "all that are" if chosen == found else f"a fixed sample of the {found:,} that are"
    scored = (
        f"The first {documents.segments:,} segments of {documents.segment_length:,} tokens of "
        f"{chosen:,} documents of the {documents.split} split, {which} long enough."
    )
    if not measured.without:
        return scored
    return (
        f"{scored} A gain of a part of the attention is how much lower the loss is than with the "
        "same weights and that part knocked out, in nats per token, with an interval of 95% over "
        "documents."
    )


def _table(documents: LongDocuments, measured: Measurement, far: Sequence[Segments]) -> str:
    """Perplexities, and what the parts of the attention gain, by position."""
    length = documents.segment_length
    # The 1st segment, the 2nd, the 3rd and 4th, the 5th to 8th, and so on.
    growing = [(1, 1)]
    while (last := growing[-1][1]) < documents.segments:
        growing.append((last + 1, min(2 * last, documents.segments)))
    names = [f"{(first - 1) * length + 1:,} to {last * length:,}" for first, last in growing]
    names += [f"from segment {first}" for first, _ in far]
    ranges = [*growing, *far]

    def perplexities(sums: np.ndarray) -> list[str]:
        losses = (each.estimate for each in measured.over(sums, ranges))
        return [f"{math.exp(min(loss, 700.0)):,.3f}" for loss in losses]

    columns = {"Tokens": names, "Perplexity": perplexities(measured.whole)}
    for part, without in measured.without.items():
        gains = measured.over(without - measured.whole, ranges)
        columns[f"Perplexity, {part} knocked out"] = perplexities(without)
        columns[f"Gain of the {part}"] = [str(each) for each in gains]
    return table([*columns], zip(*columns.values(), strict=True))


def verdict(gains: dict[int, Interval], where: str, part: Part = "memory") -> str:
    """A verdict on whether the weights use a part, from its `gains` by first segment counted."""
    (start, near), *rest = gains.items()
    gained = effect(*near)
    if gained > 0:
        found = f"**The {part} is used.** Knocking it out raises the loss by"
    elif gained < 0:
        found = f"**The {part} hurts.** The loss with it is higher than with it knocked out, by"
        rest, near = [], Interval(-near.estimate, -near.high, -near.low)
    else:
        found = f"**The {part} is not used**, as the interval includes 0: it lowers the loss by"
    further = "".join(f", and from the {first}th on {gain}" for first, gain in rest)
    return f"{found} {near} nats per token from the {start}nd segment on{further}, {where}."


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
