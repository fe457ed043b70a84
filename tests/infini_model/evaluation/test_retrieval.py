"""Haystacks and associations: what is drawn, and that it is read once, in constant memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config
from torch import Tensor

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.evaluation.retrieval.asking import ask, read
from infini_model.evaluation.retrieval.filler import (
    RANDOM,
    REPEATED,
    random_sentences,
    repeated_sentences,
)
from infini_model.evaluation.retrieval.haystack import Haystacks, build, pass_key
from infini_model.model.generation.causal import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.precision import PRECISIONS
from infini_model.model.state import State

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


ROWS, NEEDLES, ANSWER = 3, 2, 3


def small_model(**overrides: object) -> InfiniLlama:
    torch.manual_seed(0)
    model = InfiniLlama(tiny_config(initializer_range=0.4, **overrides)).eval()
    draw_memory_parameters(model)
    return model


def answered(model: InfiniLlama, body: int = 61) -> Haystacks:
    """Haystacks whose answers are what the model generates, but for one wrong token in each row."""
    generator = torch.Generator().manual_seed(1)
    bodies = torch.randint(11, (ROWS, body), generator=generator)
    questions = torch.randint(11, (ROWS, NEEDLES, 5), generator=generator)
    prompts = torch.cat((bodies.repeat_interleave(NEEDLES, 0), questions.flatten(0, 1)), 1)
    new = generate(model, prompts, max_new_tokens=ANSWER, temperature=0.0)
    answers = torch.tensor(new).view(ROWS, NEEDLES, ANSWER)
    answers[:, 0, 1] = (answers[:, 0, 1] + 1) % 11
    return Haystacks(bodies, questions, answers)


def whole(model: InfiniLlama, haystacks: Haystacks) -> Tensor:
    """Whether each answer token is the likeliest, by one pass over each whole sequence."""
    found = []
    for body, questions, answers in zip(*haystacks, strict=True):
        for question, answer in zip(questions, answers, strict=True):
            ids = torch.cat((body, question, answer.clamp(min=0)))
            with torch.no_grad():
                logits = model(ids[None]).logits[0]
            found.append(logits[-ANSWER - 1 : -1].argmax(-1) == answer)
    return torch.stack(found).view(haystacks.answers.shape)


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_the_answers_are_those_of_whole_sequences(memory: str) -> None:
    model = small_model(memory=memory)
    haystacks = answered(model)
    right = whole(model, haystacks)
    assert 0 < right.sum() < right.numel()
    for rows in (1, 2, 3):
        found = ask(model, haystacks, rows)
        assert torch.equal(found.right, right.sum(-1))
        assert (found.tokens == ANSWER).all()


def test_what_follows_a_short_answer_does_not_count() -> None:
    model = small_model()
    haystacks = answered(model)
    haystacks.answers[:, :, -1] = IGNORED
    found = ask(model, haystacks, ROWS)
    assert (found.tokens == ANSWER - 1).all()
    assert (found.right[:, 1] == ANSWER - 1).all()


def size(state: State) -> int:
    tensors = [
        tensor
        for layer in state.layers
        for tensor in (*layer.memory, layer.keys, layer.values, layer.memory_keys, layer.last_key)
    ]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_neither_the_state_nor_a_chunk_grows_with_the_length() -> None:
    model, chunks = small_model(), list[int]()
    model.model.embed_tokens.register_forward_hook(
        lambda module, arguments, output: chunks.append(arguments[0].numel())
    )
    sizes = [size(read(model, torch.zeros(2, body, dtype=torch.int64))) for body in (17, 30_001)]
    assert sizes[0] == sizes[1]
    assert max(chunks) <= PREFILL_TOKENS < sum(chunks)


def test_a_haystack_is_read_once_for_all_its_needles() -> None:
    model, read_tokens = small_model(), list[int]()
    haystacks = answered(model)
    model.model.embed_tokens.register_forward_hook(
        lambda module, arguments, output: read_tokens.append(arguments[0].numel())
    )
    ask(model, haystacks, ROWS)
    asked = NEEDLES * (haystacks.questions.size(-1) + ANSWER - 1)
    # The last chunk of a body is padded to a segment.
    body = -(-haystacks.bodies.size(1) // 4) * 4
    assert sum(read_tokens) <= ROWS * (body + asked)


def test_repeated_rows_stay_together() -> None:
    model = small_model(memory_query_shift=True)
    bodies = torch.from_numpy(np.random.default_rng(0).integers(11, size=(2, 10)))
    state, more = read(model, bodies), torch.arange(4)[:, None].expand(4, 3)
    with torch.inference_mode():
        hidden, _ = model.extend(more, state.repeat(2))
        expected, _ = model.extend(more, read(model, bodies[[0, 0, 1, 1]]))
    torch.testing.assert_close(hidden, expected)


def test_questions_are_asked_in_the_precision_in_which_the_bodies_are_read() -> None:
    model = small_model()
    haystacks = answered(model)
    model.precision = PRECISIONS["bf16"]
    found = ask(model, haystacks, 2)
    assert (found.tokens == ANSWER).all()
    assert found.right.sum() > 0
