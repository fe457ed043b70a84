"""What needles are hidden in: sentences that repeat, sentences at random, or documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from infini_model.data.loading.stream import TokenStream
from infini_model.evaluation.retrieval.haystack import Encode

# Draws at least so many tokens.
Filler = Callable[[np.random.Generator, int], np.ndarray]

# As in arXiv 2305.16300.
REPEATED = (
    *(" The grass is green.", " The sky is blue.", " The sun is yellow."),
    *(" Here we go.", " There and back again."),
)
_SUBJECTS = ("The baker", "A child", "The old man", "My sister", "The captain", "A stranger")
_VERBS = ("walks", "waits", "sings", "sleeps", "works", "looks around")
_PLACES = ("by the river", "in the garden", "behind the house", "on the hill", "at the market")
RANDOM = tuple(f" {' '.join(words)}." for words in itertools.product(_SUBJECTS, _VERBS, _PLACES))


def repeated_sentences(encode: Encode) -> Filler:
    """The same five sentences over and over."""
    cycle = np.concatenate([encode(sentence) for sentence in REPEATED])
    return lambda rng, tokens: np.resize(cycle, tokens)  # noqa: ARG005


def random_sentences(encode: Encode) -> Filler:
    """Sentences drawn at random."""
    pool = [np.asarray(encode(sentence)) for sentence in RANDOM]
    shortest = min(map(len, pool))

    def draw(rng: np.random.Generator, tokens: int) -> np.ndarray:
        drawn = rng.integers(len(pool), size=tokens // shortest + 1)
        return np.concatenate([pool[number] for number in drawn])

    return draw


def documents(stream: TokenStream) -> Filler:
    """The documents of a split in random order, over and over, without their end-of-text tokens."""

    def draw(rng: np.random.Generator, tokens: int) -> np.ndarray:
        found: list[np.ndarray] = []
        have = 0
        for number in rng.permutation(stream.documents):
            found.append(stream.document(int(number))[:-1])
            have += len(found[-1])
            if have >= tokens:
                break
        return np.resize(np.concatenate(found), max(have, tokens))

    return draw
