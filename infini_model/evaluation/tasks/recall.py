"""Associative recall across segments, with tokens of the model's own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.config.evaluation import RecallConfig
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.retrieval.asking import read
from infini_model.evaluation.retrieval.associations import Questions, Shape, Vocabulary, draw
from infini_model.evaluation.retrieval.findings import NEEDS_CAUSAL, percent
from infini_model.evaluation.statistics import Interval, wilson
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, TaskResult
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

QUARTERS = 4
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class Counts(NamedTuple):
    """Answers of one length, by the quarter of the sequence in which the answer is: [4] each.

    Attributes:
        answers: Answers.
        right: Those where the right token is the likeliest of all.
        right_of_values: Those where it is the likeliest of the values.
    """

    answers: list[int]
    right: list[int]
    right_of_values: list[int]


class Task(EvaluationTask):
    """Writes pairs of tokens into early segments and asks for them in the last one."""

    title = "Associative recall"

    def sequences(self, subject: Subject) -> int:
        """All sequences of all lengths."""
        settings = subject.config.evaluation.recall
        if subject.model.config.bidirectional:
            return 0
        return len(set(settings.lengths)) * settings.sequences

    def check(self, subject: Subject) -> None:
        """Refuse segments that are too short for the pairs, and too small a vocabulary."""
        if not subject.model.config.bidirectional:
            _alphabet(subject)

    def run(self, subject: Subject) -> TaskResult:
        """Measure with the settings in `evaluation.recall` and the run's seed."""
        settings, seed = subject.config.evaluation.recall, subject.config.run.seed
        if subject.model.config.bidirectional:
            return TaskResult(section=NEEDS_CAUSAL)
        shape, tokens = _alphabet(subject)
        # One more length costs only itself.
        cells = subject.cells("recall", settings.updated(lengths=[]))
        measured = {}
        for segments in sorted(set(settings.lengths)):
            generator = torch.Generator().manual_seed(_seed(seed, segments))
            questions = draw(shape, settings.sequences, segments, 1, generator)
            rows = subject.config.evaluation.batch_size
            ask = partial(answer, subject.model, shape.vocabulary, tokens, questions, rows)
            measured[segments] = Counts(*cells.measured(str(segments), ask))
            subject.on_windows(settings.sequences)
        return _result(subject, settings, shape.vocabulary, measured)


def _alphabet(subject: Subject) -> tuple[Shape, Tensor]:
    """What the sequences are made of. Raises `UserError` as `Task.check` does."""
    segment, pairs = subject.model.config.segment_length, subject.config.evaluation.recall.pairs
    if segment < 2 * pairs:
        raise UserError(
            f"evaluation.recall.pairs: {pairs} pairs need segments of at least {2 * pairs} tokens, "
            f"the model has segments of {segment}"
        )
    shape, tokenizer = Shape(segment, pairs), load_dataset_tokenizer(subject.dataset_dir)
    return shape, ordinary_tokens(tokenizer, shape, subject.config.run.seed)


def ordinary_tokens(tokenizer: Tokenizer, shape: Shape, seed: int) -> Tensor:
    """Different tokens of readable text for `shape.vocabulary`, drawn by seed: [size] int64.

    Raises `UserError` if there are not enough.
    """
    found: list[int] = []
    for token in np.random.default_rng(seed).permutation(tokenizer.vocab_size).tolist():
        text = tokenizer.decode([token])
        if text.strip() and text.isprintable() and UNREADABLE not in text:
            found.append(token)
        if len(found) == shape.vocabulary.size:
            return torch.tensor(found)
    raise UserError(
        f"evaluation.tasks: recall needs {shape.vocabulary.size} tokens of readable text, the "
        f"tokenizer {tokenizer.spec} has {len(found)}"
    )


@torch.inference_mode()
def answer(
    model: InfiniLlama, vocabulary: Vocabulary, tokens: Tensor, questions: Questions, rows: int
) -> Counts:
    """Read `rows` sequences at once and count the right answers; the model must be causal."""
    segment, values = model.config.segment_length, slice(vocabulary.keys, -vocabulary.fillers)
    counts = torch.zeros(3, QUARTERS, dtype=torch.int64)
    for batch in map(
        Questions._make, zip(*(torch.split(each, rows) for each in questions), strict=True)
    ):
        ids = tokens[batch.input_ids]
        state = read(model, ids[:, :-segment])
        asked, device = batch.labels >= 0, model.lm_head.weight.device
        with model.precision.autocast(device):
            hidden, _ = model.extend(ids[:, -segment:].to(device), state)
            logits = model.lm_head(hidden[asked[:, -segment:].to(device)]).cpu()
        labels, segments = batch.labels[asked], batch.input_ids.size(1) // segment
        right = logits.argmax(-1) == tokens[labels]
        of_values = logits[:, tokens[values]].argmax(-1) == labels - vocabulary.keys
        quarter = batch.written[asked] * QUARTERS // (segments - 1)
        for number, each in enumerate((torch.ones_like(right), right, of_values)):
            counts[number] += torch.bincount(quarter[each], minlength=QUARTERS)
    return Counts(*counts.tolist())


def _seed(seed: int, segments: int) -> int:
    return int(np.random.SeedSequence((seed, segments)).generate_state(1)[0])


def _result(
    subject: Subject, settings: RecallConfig, vocabulary: Vocabulary, measured: dict[int, Counts]
) -> TaskResult:
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    rows = []
    for segments, found in measured.items():
        of_all, of_values = (_share(each, found.answers) for each in found[1:])
        for name, each in (("recall", of_all), ("recall_of_values", of_values)):
            metric = f"evaluation/{name}/{segments}"
            metrics[metric], intervals[metric] = each.estimate, (each.low, each.high)
        worst = min(x / n for x, n in zip(found.right, found.answers, strict=True) if n)
        cells = (percent(of_all), percent(of_values), f"{worst:.0%}", f"{sum(found.answers):,}")
        rows.append((f"{segments:,}", *cells))
    chance = 1 / vocabulary.values
    longest, best = max(measured), max(_of_values(each).low for each in measured.values())
    advice = (
        "Recall is not above guessing, as is usual for a model whose training never asked for "
        "what stood far back: judge the memory by its gain in loss first."
    )
    return TaskResult(
        metrics=metrics,
        intervals=intervals,
        section=_section(subject, settings, vocabulary, rows),
        summary=[
            f"Associative recall: {percent(_of_values(measured[longest]))} right among the values "
            f"at {longest:,} segments; guessing gives {chance:.1%}."
        ],
        advice=[advice] if best <= chance else [],
        details={str(segments): each._asdict() for segments, each in measured.items()},
    )


def _section(
    subject: Subject,
    settings: RecallConfig,
    vocabulary: Vocabulary,
    rows: Sequence[tuple[str, ...]],
) -> str:
    trained = subject.config.packing.context_length // subject.model.config.segment_length
    header = ("Segments", "Right of all tokens", "Right of the values", "Worst quarter", "Answers")
    parts = [
        f"{settings.pairs} keys, each followed by its value, are written among fillers, and the "
        "last segment asks for every value. All are tokens of the dataset's vocabulary, drawn at "
        f"random. The model was trained on windows of {trained:,} segments. Guessing among the "
        f"{vocabulary.values} values is right in {1 / vocabulary.values:.1%}, among all tokens in "
        f"{1 / subject.model.lm_head.out_features:.2%}.",
        table(header, rows),
        "Intervals are of 95%. The worst quarter is that of the sequence whose values are found "
        "least often.",
    ]
    if subject.model.config.memory == "none":
        parts.append("The model has no memory: it sees only the segment of the question.")
    return "\n\n".join(parts)


def _of_values(counts: Counts) -> Interval:
    return _share(counts.right_of_values, counts.answers)


def _share(right: list[int], answers: list[int]) -> Interval:
    return wilson(sum(right), sum(answers))
