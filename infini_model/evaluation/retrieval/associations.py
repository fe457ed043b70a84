"""Associative recall: keys with values among fillers, and questions for the values.

Early segments hold the pairs. The last segment asks for every key, and a filler follows each
question, never its answer: attention inside the segment cannot see an answer, and none can be
guessed by elimination. After Arora et al. (arXiv 2312.04927).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Vocabulary(NamedTuple):
    """Numbers of the tokens of each kind: keys come first, then values, then fillers."""

    keys: int = 32
    values: int = 32
    fillers: int = 16

    @property
    def size(self) -> int:
        """All of them; also the masked token, where there is one."""
        return self.keys + self.values + self.fillers


class Shape(NamedTuple):
    """What the sequences are made of.

    Attributes:
        segment: Tokens of a segment, at least twice as many as pairs.
        pairs: Pairs of key and value in a sequence, at most as many as keys.
        vocabulary: Tokens of each kind.
    """

    segment: int
    pairs: int
    vocabulary: Vocabulary = Vocabulary()


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
    length, pairs, vocabulary = shape

    def shuffled(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator).argsort(dim=-1)

    row, pair = torch.arange(rows)[:, None], torch.arange(pairs)[:, None]
    keys = shuffled(rows, vocabulary.keys)[:, :pairs]
    values = vocabulary.keys + shuffled(rows, pairs, vocabulary.values)[..., :writings]
    segment = shuffled(rows, pairs, segments - 1)[..., :writings].sort(dim=-1).values
    # Each segment's places are shuffled and pair i takes the ith, so no two pairs overlap.
    place = shuffled(rows, segments - 1, length // 2)[row[..., None], segment, pair]
    start = segment * length + 2 * place
    step = 2 if masked else 1
    question = (segments - 1) * length + step * shuffled(rows, length // step)[:, :pairs]

    sizes = (rows, segments * length)
    fillers = torch.randint(vocabulary.fillers, sizes, generator=generator)
    input_ids = vocabulary.keys + vocabulary.values + fillers
    input_ids[row[..., None], start] = keys[..., None].expand_as(start)
    input_ids[row[..., None], start + 1] = values
    input_ids[row, question] = keys
    if masked:
        question += 1
        input_ids[row, question] = vocabulary.size
    labels, written = torch.full(sizes, -100), torch.full(sizes, -100)
    labels[row, question] = values[..., -1]
    written[row, question] = segment[..., -1]
    return Questions(input_ids, labels, written)
