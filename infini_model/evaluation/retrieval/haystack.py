"""Haystacks: filler of an exact length with needles at chosen depths, and the questions for them.

The needles are the pass keys of Mohtashami and Jaggi (arXiv 2305.16300): random numbers that
nothing but the needle tells. All is built from token ids, so that lengths are exact with any
tokenizer, and the answer has the same tokens in the needle as after the question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.model.loss import IGNORED

Encode = Callable[[str], list[int]]


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


def draw_key(rng: np.random.Generator, digits: int) -> int:
    """A random number of so many digits, the first of which is not 0."""
    return int(rng.integers(10 ** (digits - 1), 10**digits))


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

    Args:
        fillers: Token ids for each haystack, at least `length`.
        needles: K needles for each haystack.
        depths: The share of the filler that stands before each of them, 0 to 1.
        length: Tokens of a sequence.

    Raises `ValueError` if there is no room for the needles and the question.
    """
    every = [needle for row in needles for needle in row]
    answer = max(len(needle.answer) for needle in every)
    question = max(len(needle.question) for needle in every)
    hidden = [sum(len(needle.statement) for needle in row) for row in needles]
    if (needed := max(hidden) + question + answer) > length:
        raise ValueError(f"needles and question take {needed} tokens")
    bodies, questions, answers = [], [], []
    for filler, row, at, statements in zip(fillers, needles, depths, hidden, strict=True):
        hay = length - question - answer - statements
        bodies.append(_hide(filler[:hay], row, at))
        rest = filler[hay : hay + question].tolist()
        questions.append([rest[len(needle.question) :] + needle.question for needle in row])
        answers.append(
            [needle.answer + [IGNORED] * (answer - len(needle.answer)) for needle in row]
        )
    return Haystacks(
        torch.from_numpy(np.stack(bodies)), torch.tensor(questions), torch.tensor(answers)
    )


def _hide(hay: np.ndarray, needles: Sequence[Needle], depths: Sequence[float]) -> np.ndarray:
    """`hay` with the needles' statements at their depths, int64."""
    places = [round(depth * len(hay)) for depth in depths]
    order = np.argsort(places, kind="stable")
    pieces = np.split(hay, np.sort(places))
    mixed = [pieces[0]]
    for number, piece in zip(order, pieces[1:], strict=True):
        mixed += [np.asarray(needles[number].statement), piece]
    return np.concatenate(mixed).astype(np.int64)
