"""A haystack is read once, in chunks and in constant memory, with the answers of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config
from torch import Tensor

from infini_model.evaluation.retrieval.asking import ask, read
from infini_model.evaluation.retrieval.haystack import Haystacks
from infini_model.model.generation.causal import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.precision import PRECISIONS
from infini_model.model.state import State

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


def test_an_answer_is_right_as_a_whole_if_greedy_generation_gives_it() -> None:
    model = small_model()
    found = ask(model, answered(model), ROWS)
    exact = found.right == found.tokens
    assert exact[:, 1].all()
    assert not exact[:, 0].any()


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
