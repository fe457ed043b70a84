"""The sequences of associative recall, which are those of `benchmarks.recall`."""

from __future__ import annotations

import hashlib

import pytest
import torch

from infini_model.evaluation.retrieval.associations import Questions, Shape, draw

SEGMENT, PAIRS = 32, 8
SHAPE = Shape(SEGMENT, PAIRS)
KEYS, VALUES, _ = SHAPE.vocabulary
MASK = SHAPE.vocabulary.size
ROWS = 64
TASKS = [(2, 1), (8, 1), (3, 2), (8, 2)]


def drawn(segments: int, writings: int, seed: int = 0) -> Questions:
    return draw(SHAPE, ROWS, segments, writings, torch.Generator().manual_seed(seed))


def is_key(token: int) -> bool:
    return token < KEYS


def is_value(token: int) -> bool:
    return KEYS <= token < KEYS + VALUES


@pytest.mark.parametrize(("segments", "writings"), TASKS)
def test_each_key_is_asked_once_and_its_newest_value_is_the_answer(
    segments: int, writings: int
) -> None:
    batch = drawn(segments, writings)
    for tokens, labels, written in zip(*(x.tolist() for x in batch), strict=True):
        asked = (segments - 1) * SEGMENT
        pairs = [(at, tokens[at]) for at in range(asked) if is_key(tokens[at])]
        assert len(pairs) == PAIRS * writings
        newest = {key: (at // SEGMENT, tokens[at + 1]) for at, key in pairs}
        assert len(newest) == PAIRS
        answers = {
            tokens[at]: (written[at], labels[at]) for at in range(len(tokens)) if labels[at] != -100
        }
        assert answers == newest
        assert sum(map(is_key, tokens[asked:])) == PAIRS


@pytest.mark.parametrize(("segments", "writings"), TASKS)
def test_answers_are_only_in_earlier_segments(segments: int, writings: int) -> None:
    batch = drawn(segments, writings)
    asked = batch.labels != -100
    assert asked.sum() == ROWS * PAIRS
    assert not asked[:, :-SEGMENT].any()
    assert (batch.written[asked] < segments - 1).all()
    assert not any(map(is_value, batch.input_ids[:, -SEGMENT:].flatten().tolist()))


def test_a_masked_token_follows_each_question_of_block_diffusion() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = draw(SHAPE, ROWS, 3, 1, generator, masked=True)
    asked = batch.labels != -100
    assert asked.sum() == ROWS * PAIRS
    assert torch.equal(batch.input_ids == MASK, asked)
    questions = batch.input_ids[asked.roll(-1, dims=1)]
    assert questions.max() < KEYS
    assert not any(map(is_value, batch.input_ids[:, -SEGMENT:].flatten().tolist()))


def test_answers_come_from_every_depth_and_are_spread_over_all_values() -> None:
    batch = drawn(8, 1)
    asked = batch.labels != -100
    assert set(batch.written[asked].tolist()) == set(range(7))
    assert len(set(batch.labels[asked].tolist())) == VALUES


# Of the tensors of `Questions`, by segments, writings and whether answers are masked tokens.
PUBLISHED = {
    (2, 1, False): "ded8979bc601ecf6",
    (8, 1, False): "81f44cb2b6a20543",
    (3, 2, False): "710cfb81ead56312",
    (8, 2, False): "cc0dbf0591becd49",
    (2, 1, True): "b2845065b9a11141",
    (8, 1, True): "236f43fb8b6bb0fe",
    (3, 2, True): "8f7b5f19db963077",
    (8, 2, True): "a25af5ad199f7c14",
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_sequences_are_those_of_the_published_figures(case: tuple[int, int, bool]) -> None:
    segments, writings, masked = case
    generator = torch.Generator().manual_seed(5)
    batch = draw(SHAPE, ROWS, segments, writings, generator, masked=masked)
    content = b"".join(tensor.numpy().tobytes() for tensor in batch)
    assert hashlib.sha256(content).hexdigest()[:16] == PUBLISHED[case]
