"""Associative recall across segments, with tokens of the model's own vocabulary.

Early segments hold pairs of a key and its value among fillers. The last segment asks for every key,
and a filler follows each question, never its answer: attention inside the segment cannot see an
answer, and none can be guessed by elimination. After Arora et al. (arXiv 2312.04927).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.context import EvalContext, kept_or_computed
from infini_model.evaluation.pages import table
from infini_model.evaluation.statistics import Interval, wilson
from infini_model.evaluation.task import NEEDS_CAUSAL, EvaluationTask, TaskResult
from infini_model.model.generate import read_prompts
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

# Tokens of each kind, in the order of their numbers; a masked one, if there is one, is the next.
KEYS, VALUES, FILLERS = 32, 32, 16
VOCABULARY = KEYS + VALUES + FILLERS
QUARTERS = 4
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


class Shape(NamedTuple):
    """Tokens of a segment, and pairs of key and value: at most half as many, and `KEYS`."""

    segment: int
    pairs: int


class Questions(NamedTuple):
    """Sequences of one length.

    Attributes:
        input_ids: [B, T] int64.
        labels: [B, T] int64, the answer at each question, or at the masked token after it, and -100
            elsewhere.
        written: [B, T] int64, the segment of each answer in its place.
    """

    input_ids: Tensor
    labels: Tensor
    written: Tensor


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


class Recall(EvaluationTask):
    """Writes pairs of tokens into early segments and asks for them in the last one."""

    title = "Associative recall"

    def sequences(self, context: EvalContext) -> int:
        """All sequences of all lengths."""
        settings = context.config.evaluation.recall
        if context.model.config.bidirectional:
            return 0
        return len(set(settings.lengths)) * settings.sequences

    def check(self, context: EvalContext) -> None:
        """Refuse segments that are too short for the pairs, and too small a vocabulary."""
        if not context.model.config.bidirectional:
            _alphabet(context)

    def run(self, context: EvalContext) -> TaskResult:
        """Measure with the settings in `evaluation.recall` and the run's seed."""
        settings, seed = context.config.evaluation.recall, context.config.run.seed
        if context.model.config.bidirectional:
            return TaskResult(section=NEEDS_CAUSAL)
        shape, tokens = _alphabet(context)
        # One more length costs only itself.
        folder = context.kept_folder("recall", settings.updated(lengths=[]).model_dump(mode="json"))
        measured = {}
        for segments in sorted(set(settings.lengths)):
            own = np.random.SeedSequence((seed, segments)).generate_state(1)[0]
            generator = torch.Generator().manual_seed(int(own))
            questions = draw(shape, settings.sequences, segments, 1, generator)
            rows = context.config.evaluation.batch_size
            ask = partial(answer, context.model, tokens, questions, rows)
            measured[segments] = Counts(*kept_or_computed(folder, str(segments), ask))
            context.on_windows(settings.sequences)
        return _result(context, measured)


def _alphabet(context: EvalContext) -> tuple[Shape, Tensor]:
    """What the sequences are made of. Raises `UserError` as `Recall.check` does."""
    segment, pairs = context.model.config.segment_length, context.config.evaluation.recall.pairs
    if segment < 2 * pairs:
        raise UserError(
            f"evaluation.recall.pairs: {pairs} pairs need segments of at least {2 * pairs} tokens, "
            f"the model has segments of {segment}"
        )
    tokenizer = load_dataset_tokenizer(context.dataset_dir)
    return Shape(segment, pairs), ordinary_tokens(tokenizer, context.config.run.seed)


def ordinary_tokens(tokenizer: Tokenizer, seed: int) -> Tensor:
    """Different tokens of readable text, drawn by seed: [VOCABULARY] int64.

    Raises `UserError` if there are not enough.
    """
    found: list[int] = []
    for token in np.random.default_rng(seed).permutation(tokenizer.vocab_size).tolist():
        text = tokenizer.decode([token])
        if text.strip() and text.isprintable() and UNREADABLE not in text:
            found.append(token)
        if len(found) == VOCABULARY:
            return torch.tensor(found)
    raise UserError(
        f"evaluation.tasks: recall needs {VOCABULARY} tokens of readable text, the tokenizer "
        f"{tokenizer.spec} has {len(found)}"
    )


def draw(
    shape: Shape,
    rows: int,
    segments: int,
    writings: int,
    generator: torch.Generator,
    *,
    masked: bool = False,
) -> Questions:
    """Sequences whose last segment asks for all keys, each written in `writings` segments.

    They are drawn uniformly from all but the last, so there must be more than `writings` segments;
    the newest value is the answer. With `masked`, a masked token follows each question.
    """
    length, pairs = shape

    def shuffled(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator).argsort(dim=-1)

    row, pair = torch.arange(rows)[:, None], torch.arange(pairs)[:, None]
    keys = shuffled(rows, KEYS)[:, :pairs]
    values = KEYS + shuffled(rows, pairs, VALUES)[..., :writings]
    segment = shuffled(rows, pairs, segments - 1)[..., :writings].sort(dim=-1).values
    # Each segment's places are shuffled and pair i takes the ith, so no two pairs overlap.
    place = shuffled(rows, segments - 1, length // 2)[row[..., None], segment, pair]
    start = segment * length + 2 * place
    step = 2 if masked else 1
    question = (segments - 1) * length + step * shuffled(rows, length // step)[:, :pairs]

    sizes = (rows, segments * length)
    input_ids = KEYS + VALUES + torch.randint(FILLERS, sizes, generator=generator)
    input_ids[row[..., None], start] = keys[..., None].expand_as(start)
    input_ids[row[..., None], start + 1] = values
    input_ids[row, question] = keys
    if masked:
        question += 1
        input_ids[row, question] = VOCABULARY
    labels, written = torch.full(sizes, -100), torch.full(sizes, -100)
    labels[row, question] = values[..., -1]
    written[row, question] = segment[..., -1]
    return Questions(input_ids, labels, written)


@torch.inference_mode()
def answer(model: InfiniLlama, tokens: Tensor, questions: Questions, rows: int) -> Counts:
    """Read `rows` sequences at once and count the right answers; the model must be causal."""
    segment, values = model.config.segment_length, tokens[KEYS:-FILLERS]
    counts = torch.zeros(3, QUARTERS, dtype=torch.int64)
    device = model.lm_head.weight.device
    for batch in map(
        Questions._make, zip(*(torch.split(each, rows) for each in questions), strict=True)
    ):
        ids, asked = tokens[batch.input_ids], batch.labels >= 0
        before = ids[:, :-segment]
        _, state = read_prompts(model, before, torch.full((len(ids),), before.size(1)))
        with model.precision.autocast(device):
            hidden, _ = model.extend(ids[:, -segment:].to(device), state)
            logits = model.lm_head(hidden[asked[:, -segment:].to(device)]).cpu()
        labels, segments = batch.labels[asked], batch.input_ids.size(1) // segment
        right = logits.argmax(-1) == tokens[labels]
        of_values = logits[:, values].argmax(-1) == labels - KEYS
        quarter = batch.written[asked] * QUARTERS // (segments - 1)
        for number, each in enumerate((torch.ones_like(right), right, of_values)):
            counts[number] += torch.bincount(quarter[each], minlength=QUARTERS)
    return Counts(*counts.tolist())


def _result(context: EvalContext, measured: dict[int, Counts]) -> TaskResult:
    found, of_values, rows = dict[str, Interval](), {}, []
    for segments, counts in measured.items():
        answers = sum(counts.answers)
        of_all = wilson(sum(counts.right), answers)
        of_values[segments] = wilson(sum(counts.right_of_values), answers)
        found[f"evaluation/recall/{segments}"] = of_all
        found[f"evaluation/recall_of_values/{segments}"] = of_values[segments]
        worst = min(x / n for x, n in zip(counts.right, counts.answers, strict=True) if n)
        shares = (of_all.percent, of_values[segments].percent, f"{worst:.0%}")
        rows.append((f"{segments:,}", *shares, f"{answers:,}"))
    chance, longest = 1 / VALUES, max(measured)
    trained = context.config.packing.context_length // context.model.config.segment_length
    header = ("Segments", "Right of all tokens", "Right of the values", "Worst quarter", "Answers")
    parts = [
        f"{context.config.evaluation.recall.pairs} keys, each followed by its value, are written "
        "among fillers, and the last segment asks for every value. All are tokens of the dataset's "
        "vocabulary, drawn at random. The model was trained on windows of "
        f"{trained:,} segments. Guessing among the {VALUES} values is right in "
        f"{chance:.1%}, among all tokens in {1 / context.model.lm_head.out_features:.2%}.",
        table(header, rows),
        "Intervals are of 95%. The worst quarter is that of the sequence whose values are found "
        "least often.",
    ]
    if context.model.config.memory == "none":
        parts.append("The model has no memory: it sees only the segment of the question.")
    advice = (
        "Recall is not above guessing, as is usual for a model whose training never asked for "
        "what stood far back: judge the memory by its gain in loss first."
    )
    return TaskResult.of(
        found,
        section="\n\n".join(parts),
        summary=[
            f"Associative recall: {of_values[longest].percent} right among the values "
            f"at {longest:,} segments; guessing gives {chance:.1%}."
        ],
        advice=[advice] if max(each.low for each in of_values.values()) <= chance else [],
        details={str(segments): each._asdict() for segments, each in measured.items()},
    )
