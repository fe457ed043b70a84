"""Retrieval by length and depth: one number, or several, hidden in filler and asked for at the end.

The needles are the pass keys of Mohtashami and Jaggi (arXiv 2305.16300): random numbers that
nothing but the needle tells. All is built from token ids, so that lengths are exact with any
tokenizer, and the answer has the same tokens in the needle as after the question.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from infini_model.config import Config
from infini_model.config.evaluation import PasskeyConfig
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.context import EvalContext, Pass, kept_or_computed
from infini_model.evaluation.pages import table
from infini_model.evaluation.plots import plot_heat_map
from infini_model.evaluation.statistics import Interval, wilson
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.model.generate import read_prompts
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.runtime.errors import UserError

Encode = Callable[[str], list[int]]

OWNERS = (
    *("Anna", "Omar", "Lena", "Ivan", "Rosa", "Hugo", "Mina", "Karl"),
    *("Yuki", "Noah", "Vera", "Liam", "Zara", "Paul", "Ines", "Otto"),
)
_SUBJECTS = ("The baker", "A child", "The old man", "My sister", "The captain", "A stranger")
_VERBS = ("walks", "waits", "sings", "sleeps", "works", "looks around")
_PLACES = ("by the river", "in the garden", "behind the house", "on the hill", "at the market")
RANDOM = tuple(f" {' '.join(words)}." for words in itertools.product(_SUBJECTS, _VERBS, _PLACES))
NEEDS_CAUSAL = "Not measured: the questions are for a causal model, which continues a text."


class Passkey(EvaluationTask):
    """Hides numbers in a long context and asks for them at the end."""

    title = "Pass keys"

    def work(self, context: EvalContext) -> dict[Pass | str, int]:
        if context.model.config.bidirectional:
            return {}
        settings = context.config.evaluation.passkey
        return {self.title: len(set(settings.lengths)) * settings.trials * _haystacks(settings)}

    def check(self, context: EvalContext) -> None:
        if not context.model.config.bidirectional:
            tokenizer = load_dataset_tokenizer(context.dataset_dir)
            draw_trial(context.config, tokenizer, min(context.config.evaluation.passkey.lengths), 0)

    def run(self, context: EvalContext) -> TaskResult:
        """Ask for the needles at all lengths and depths of the settings, drawn by the run's seed.

        Finished trials are kept: one more length, or trial, costs only itself.
        """
        if context.model.config.bidirectional:
            return TaskResult(section=NEEDS_CAUSAL)
        settings, trained = context.config.evaluation.passkey, context.config.packing.context_length
        tokenizer = load_dataset_tokenizer(context.dataset_dir)
        whole = settings.updated(lengths=[], trials=0).model_dump(mode="json")
        folder = context.kept_folder("passkey", whole)

        def answered(length: int, number: int) -> list[list[int]]:
            """Of each answer of a trial the number of its depth, its right tokens, and all."""
            haystacks, depths = draw_trial(context.config, tokenizer, length, number)
            counts = ask(context.model, haystacks, context.config.evaluation.batch_size)
            return [depths.flatten().tolist(), *(each.flatten().tolist() for each in counts)]

        found, at, by_depth, rows = dict[str, Interval](), [], [], []
        lengths = sorted(set(settings.lengths))
        for length in lengths:
            trials = []
            for number in range(settings.trials):
                answers = partial(answered, length, number)
                trials.append(kept_or_computed(folder, f"{length}-{number}", answers))
                context.on_windows(_haystacks(settings))
            depths, right, tokens = np.concatenate(trials, axis=1)
            is_exact, count, size = right == tokens, len(right), length * trained
            exact = wilson(int(is_exact.sum()), count)
            # The sample is of answers, whose tokens are not independent.
            of_tokens = wilson(count * float(right.sum() / tokens.sum()), count)
            found[f"evaluation/passkey_exact_match/{size}"] = exact
            found[f"evaluation/passkey_token_accuracy/{size}"] = of_tokens
            at.append(f"{exact.percent} at {size:,} tokens ({length} x the trained context)")
            shares = np.bincount(depths, is_exact) / np.bincount(depths)
            by_depth.append(shares)
            worst = f"{shares.min():.0%} at {settings.depths[shares.argmin()]:g}%"
            name = f"{size:,} ({length} x)"
            rows.append((name, exact.percent, of_tokens.percent, worst, f"{count:,}"))
        picture = plot_heat_map(
            np.stack(by_depth, axis=1),
            [f"{length * trained:,}\n{length} x trained" for length in lengths],
            settings.depths,
            context.plots_dir / "passkey.png",
            title=self.title,
            trained=sum(length <= 1 for length in lengths),
        )
        header = ("Tokens", "Whole answer right", "Tokens right", "Worst depth", "Answers")
        return TaskResult.of(
            found,
            section=_section(settings, trained, table(header, rows)),
            summary=[f"{self.title}: the model finds {', '.join(at)}."],
            pictures={f"{self.title} found, by length and depth": picture},
        )


def _section(settings: PasskeyConfig, trained: int, grid: str) -> str:
    hidden = "A number is" if settings.needles == 1 else f"{settings.needles} numbers are"
    return (
        f"{hidden} hidden in random sentences and asked for at the end. The model was trained on "
        f"windows of {trained:,} tokens; a guess is right once in "
        f"{9 * 10 ** (settings.digits - 1):,} times.\n\n{grid}\n\nIntervals are of 95%. A token is "
        "right if it is the likeliest after the question and the tokens of the answer before it, "
        "so a whole answer is right if greedy generation gives it."
    )


class Needle(NamedTuple):
    """The token ids of a statement, of the question for it up to the answer, and of the answer."""

    statement: list[int]
    question: list[int]
    answer: list[int]


class Haystacks(NamedTuple):
    """N haystacks of K needles: a sequence is a row of `bodies`, a question and its answer.

    Attributes:
        bodies: [N, H] int64, filler and needles.
        questions: [N, K, Q] int64; questions shorter than Q begin with filler.
        answers: [N, K, A] int64; answers shorter than A end with -100.
    """

    bodies: Tensor
    questions: Tensor
    answers: Tensor


def _haystacks(settings: PasskeyConfig) -> int:
    """Haystacks of a trial: as many as it takes for every depth to occur."""
    return -(-len(settings.depths) // settings.needles)


def draw_trial(
    config: Config, tokenizer: Tokenizer, multiple: int, number: int
) -> tuple[Haystacks, np.ndarray]:
    """Draw trial `number` of the length that is `multiple` times the trained context.

    All haystacks of a trial have the same filler. Returns them, and the number in the settings of
    each needle's depth, [N, K]; if K does not divide the number of depths, some occur twice. Raises
    `UserError` if the needles and the question are longer than the length.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch([text]).ids.tolist()
        return ids

    settings, length = config.evaluation.passkey, multiple * config.packing.context_length
    rng = np.random.default_rng((config.run.seed, multiple, number))
    filler = random_sentences([*map(encode, RANDOM)], rng, length)
    owners = [None] if settings.needles == 1 else OWNERS[: settings.needles]
    order = rng.permutation(len(settings.depths))
    depths = np.resize(order, (_haystacks(settings), len(owners)))
    numbers = rng.integers(10 ** (settings.digits - 1), 10**settings.digits, depths.shape)
    keys = [
        [pass_key(encode, key, owner) for key, owner in zip(row, owners, strict=True)]
        for row in numbers
    ]
    places = (np.array(settings.depths)[depths] / 100).tolist()
    bos = tokenizer.bos_token_id
    try:
        haystacks = build([filler] * len(depths), keys, places, length - (bos is not None))
    except ValueError as error:
        raise UserError(
            f"evaluation.passkey.lengths: {multiple} x packing.context_length is "
            f"{length:,} tokens, but {error}"
        ) from error
    if bos is not None:
        bodies = functional.pad(haystacks.bodies, (1, 0), value=bos)
        haystacks = haystacks._replace(bodies=bodies)
    return haystacks, depths


def random_sentences(
    sentences: Sequence[Sequence[int]], rng: np.random.Generator, tokens: int
) -> np.ndarray:
    """At least so many tokens of `sentences`, drawn at random."""
    drawn = rng.integers(len(sentences), size=tokens // min(map(len, sentences)) + 1)
    return np.concatenate([sentences[number] for number in drawn])


def pass_key(encode: Encode, key: int, owner: str | None = None) -> Needle:
    """A pass key; `owner` tells it from others in the same haystack."""
    subject = "pass key" if owner is None else f"pass key of {owner}"
    answer, space = encode(f" {key}"), encode(" ")
    opening = encode(f" The {subject} is")
    # A space that is a token of its own is no part of the answer.
    if answer[: len(space)] == space:
        answer, opening = answer[len(space) :], opening + space
    return Needle(
        statement=[*opening, *answer, *encode(". Remember it.")],
        question=[*encode(f" What is the {subject}?"), *opening],
        answer=answer,
    )


def build(
    fillers: Sequence[np.ndarray],
    needles: Sequence[Sequence[Needle]],
    depths: Sequence[Sequence[float]],
    length: int,
) -> Haystacks:
    """Haystacks of `length` tokens each, the question and the longest answer included.

    Each has at least `length` token ids of filler, K needles, and for each of them the share of the
    filler that stands before it, 0 to 1.

    Raises `ValueError` if there is no room for the needles and the question.
    """
    every = [needle for row in needles for needle in row]
    answer = max(len(needle.answer) for needle in every)
    question = max(len(needle.question) for needle in every)
    hidden = [[len(needle.statement) for needle in row] for row in needles]
    if (needed := max(map(sum, hidden)) + question + answer) > length:
        raise ValueError(f"needles and question take {needed} tokens")
    bodies, questions, answers = [], [], []
    for filler, row, at, sizes in zip(fillers, needles, depths, hidden, strict=True):
        hay = length - question - answer - sum(sizes)
        places = np.repeat([round(depth * hay) for depth in at], sizes)
        statements = np.concatenate([needle.statement for needle in row])
        bodies.append(np.insert(filler[:hay], places, statements))
        rest = filler[hay : hay + question].tolist()
        questions.append([rest[len(needle.question) :] + needle.question for needle in row])
        answers.append(
            [needle.answer + [IGNORED] * (answer - len(needle.answer)) for needle in row]
        )
    return Haystacks(
        torch.from_numpy(np.stack(bodies)), torch.tensor(questions), torch.tensor(answers)
    )


@torch.inference_mode()
def ask(model: InfiniLlama, haystacks: Haystacks, rows: int) -> tuple[Tensor, Tensor]:
    """Read `rows` bodies at once, each once, in chunks and in constant memory; ask for all needles.

    A token is right if it is the likeliest after the question and the right tokens before it. So
    greedy generation gives the whole answer if, and only if, all of its tokens are right. The model
    must be causal. Returns the number of right tokens of each answer, and of all its tokens, [N, K]
    int64 on the CPU.
    """
    device, right = model.lm_head.weight.device, []
    for bodies, questions, answers in zip(
        *(torch.split(tensor, rows) for tensor in haystacks), strict=True
    ):
        asked = torch.cat((questions, answers[..., :-1].clamp(min=0)), -1).flatten(0, 1)
        _, state = read_prompts(model, bodies, torch.full((len(bodies),), bodies.size(1)))
        with model.precision.autocast(device):
            state = state.repeat(answers.size(1))  # a copy, which nobody reads afterwards
            hidden, _ = model.extend(asked.to(device), state, in_place=True)
            logits = model.lm_head(hidden[:, questions.size(-1) - 1 :])
        right.append(logits.argmax(-1).cpu().view_as(answers) == answers)
    counted = haystacks.answers != IGNORED
    return (torch.cat(right) & counted).sum(-1), counted.sum(-1)
