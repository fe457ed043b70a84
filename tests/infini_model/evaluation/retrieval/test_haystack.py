"""Haystacks: exact lengths, needles at their depths, and answers with the needle's own tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.evaluation.retrieval.filler import (
    RANDOM,
    REPEATED,
    random_sentences,
    repeated_sentences,
)
from infini_model.evaluation.retrieval.haystack import Haystacks, build, draw_key, pass_key

LENGTH = 512


def bpe() -> Tokenizer:
    numbers = [f" The pass key is {number * 7919 % 100000}." for number in range(400)]
    return train_tokenizer([[*RANDOM, *REPEATED, *numbers]], 400)


@pytest.fixture(scope="module", params=[ByteTokenizer, bpe], ids=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], Tokenizer] = request.param
    return make()


def haystacks(tokenizer: Tokenizer, keys: list[list[int]], depths: list[list[float]]) -> Haystacks:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch([text]).ids.tolist()
        return ids

    rng = np.random.default_rng(0)
    owners = [None] if len(keys[0]) == 1 else ["Anna", "Maximilian", "Bo"]
    needles = [
        [pass_key(encode, key, owner) for key, owner in zip(row, owners, strict=True)]
        for row in keys
    ]
    fillers = [random_sentences(encode)(rng, LENGTH) for _ in keys]
    return build(fillers, needles, depths, LENGTH)


def text(tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    return tokenizer.decode(ids[ids >= 0].numpy())


def test_a_sequence_has_exactly_the_length_and_ends_with_question_and_answer(
    tokenizer: Tokenizer,
) -> None:
    keys = [[71432], [99999], [10000]]
    made = haystacks(tokenizer, keys, [[0.3], [0.5], [0.7]])
    assert sum(tensor.size(-1) for tensor in made) == LENGTH
    for (key,), body, question, answer in zip(keys, *made, strict=True):
        assert text(tokenizer, body).count(f" The pass key is {key}. Remember it.") == 1
        asked = text(tokenizer, question[0]) + text(tokenizer, answer[0])
        assert asked.endswith(f" What is the pass key? The pass key is {key}")
        assert text(tokenizer, answer[0]).strip() == str(key)


def test_a_space_of_its_own_is_no_part_of_the_answer() -> None:
    made = haystacks(ByteTokenizer(), [[71432]], [[0.5]])
    assert made.answers.tolist() == [[list(b"71432")]]


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_depth_is_the_share_of_filler_before_the_needle(
    tokenizer: Tokenizer, depth: float
) -> None:
    made = haystacks(tokenizer, [[71432]], [[depth]])
    body = made.bodies[0].tolist()
    needle = tokenizer.encode_batch([" The pass key is"]).ids.tolist()
    at = next(i for i in range(len(body)) if body[i : i + len(needle)] == needle)
    statement = len(tokenizer.encode_batch([" The pass key is 71432. Remember it."]).ids)
    assert at == pytest.approx(depth * (len(body) - statement), abs=2)


def test_several_needles_are_asked_for_by_their_owners(tokenizer: Tokenizer) -> None:
    made = haystacks(tokenizer, [[71432, 20202, 55555]], [[0.9, 0.1, 0.9]])
    assert sum(tensor.size(-1) for tensor in made) == LENGTH
    body = text(tokenizer, made.bodies[0])
    assert body.index("Maximilian") < body.index("Anna") < body.index("of Bo")
    for owner, key, question, answer in zip(
        ["Anna", "Maximilian", "Bo"],
        [71432, 20202, 55555],
        made.questions[0],
        made.answers[0],
        strict=True,
    ):
        assert f" The pass key of {owner} is {key}. Remember it." in body
        asked = text(tokenizer, question) + text(tokenizer, answer)
        assert asked.endswith(f"What is the pass key of {owner}? The pass key of {owner} is {key}")


def test_what_has_no_room_is_refused() -> None:
    needle = pass_key(lambda text: list(text.encode()), 71432)
    needed = sum(map(len, needle))
    filler = [np.zeros(needed, np.int64)]
    made = build(filler, [[needle]], [[0.5]], needed)
    assert made.bodies[0].tolist() == needle.statement
    with pytest.raises(ValueError, match=f"take {needed} tokens"):
        build(filler, [[needle]], [[0.5]], needed - 1)


def test_filler_is_long_enough_and_decided_by_the_seed(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch([text]).ids.tolist()
        return ids

    for make in (repeated_sentences, random_sentences):
        once, again = (make(encode)(np.random.default_rng(1), 1000) for _ in range(2))
        assert len(once) >= 1000
        assert np.array_equal(once, again)
    other = random_sentences(encode)(np.random.default_rng(2), 1000)
    assert not np.array_equal(other[:1000], once[:1000])


def test_keys_have_their_digits() -> None:
    rng = np.random.default_rng(0)
    assert {len(str(draw_key(rng, 3))) for _ in range(200)} == {3}
    assert len({draw_key(rng, 3) for _ in range(200)}) > 100
