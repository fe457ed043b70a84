"""Generation against one full pass of the model per token."""

from functools import partial

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.generation.causal import generate, stream
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError


def build(memory="linear", shift=True):
    torch.manual_seed(3)
    config = tiny_config(memory=memory, memory_key_shift=shift, initializer_range=0.4)
    model = InfiniLlama(config).double()
    draw_memory_parameters(model)
    return model


MODEL = build()
KINDS = pytest.mark.parametrize(
    ("memory", "shift"), [("linear", True), ("linear", False), ("delta", True), ("none", False)]
)


def greedy(model, prompt, count):
    """The greedy continuation by full passes, without any state."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@KINDS
@pytest.mark.parametrize("prefill_tokens", [1, 8, 64])
def test_prompts_are_read_in_any_chunks(memory, shift, prefill_tokens):
    """One segment at a time, two, or all at once, then token by token."""
    greedily = partial(generate, temperature=0, prefill_tokens=prefill_tokens)
    model = build(memory, shift)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(11, (1, 25), generator=draw)
    new = greedily(model, prompts, max_new_tokens=9)
    assert new == [greedy(model, prompts[0].tolist(), 9)]
    unequal = [prompts[0, :length].tolist() for length in (25, 8, 3)]
    new = greedily(model, unequal, max_new_tokens=6)
    assert new == [greedy(model, prompt, 6) for prompt in unequal]


def test_rows_are_sampled_independently():
    settings_ = {"max_new_tokens": 10, "temperature": 1.5, "seed": 3}
    prompts = [[1, 2, 3, 4, 5, 6], [7] * 13, [8, 9]]
    rows = generate(MODEL, prompts, **settings_)
    assert generate(MODEL, prompts[:1], **settings_) == rows[:1]
    for row, prompt in enumerate(prompts):
        others = [[0], [1, 1], [5] * 9]
        others[row] = prompt
        assert generate(MODEL, others, **settings_)[row] == rows[row]
    same = generate(MODEL, [prompts[0]] * 3, **settings_)
    assert len(set(map(tuple, same))) == 3


def test_stream_equals_generate():
    settings_ = {"max_new_tokens": 9, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 4}
    prompts = [[1, 2, 3], [4]]
    steps = list(stream(MODEL, prompts, **settings_))
    rows = generate(MODEL, prompts, **settings_)
    assert [list(row) for row in zip(*steps, strict=True)] == rows
    assert rows != generate(MODEL, prompts, **settings_ | {"seed": 5})
    assert generate(MODEL, prompts, max_new_tokens=0) == [[], []]


def test_a_row_ends_with_the_end_token():
    prompts = [[1, 2, 3], [4, 4], [7]]
    free = generate(MODEL, prompts, max_new_tokens=12, temperature=0)
    end = free[0][1]
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert generate(MODEL, prompts, max_new_tokens=12, temperature=0, eos_token_id=end) == cut
    assert len(cut[0]) <= 2


def test_sampling_respects_its_settings():
    prompt = [[1, 2, 3]]
    best = generate(MODEL, prompt, max_new_tokens=8, temperature=0)
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        assert generate(MODEL, prompt, max_new_tokens=8, seed=1, **narrow) == best
    with torch.no_grad():
        logits = MODEL(torch.tensor(prompt)).logits[0, -1]
    likeliest = set(logits.topk(3).indices.tolist())
    drawn = generate(MODEL, prompt * 300, max_new_tokens=1, temperature=3.0, top_k=3)
    assert {row[0] for row in drawn} == likeliest
    weights = (logits / 3.0).softmax(-1)
    nucleus, total = set(), 0.0
    for token in weights.argsort(descending=True).tolist():
        if total < 0.5:
            nucleus.add(token)
            total += float(weights[token])
    drawn = generate(MODEL, prompt * 300, max_new_tokens=1, temperature=3.0, top_p=0.5)
    assert {row[0] for row in drawn} == nucleus


def test_sampled_frequencies_match_the_model():
    prompt = [[1, 2, 3]]
    with torch.no_grad():
        expected = MODEL(torch.tensor(prompt)).logits[0, -1].softmax(-1)
    drawn = torch.tensor(generate(MODEL, prompt * 4000, max_new_tokens=1))[:, 0]
    observed = torch.bincount(drawn, minlength=11) / len(drawn)
    torch.testing.assert_close(observed.double(), expected, rtol=0, atol=0.04)


@pytest.mark.parametrize(
    ("message", "prompts", "change"),
    [
        ("prompts: expected at least one", [], {}),
        ("prompt 1: is empty", [[1], []], {}),
        ("prompt 0: token 11 is outside the vocabulary of 11", [[11]], {}),
        ("prompt 0: token -1 is outside", [[-1]], {}),
        ("max_new_tokens: got -1", [[1]], {"max_new_tokens": -1}),
        ("temperature: got -0.5", [[1]], {"temperature": -0.5}),
        ("temperature: got nan", [[1]], {"temperature": float("nan")}),
        ("top_k: got 0", [[1]], {"top_k": 0}),
        ("top_p: got 0.0", [[1]], {"top_p": 0.0}),
        ("seed: got -1", [[1]], {"seed": -1}),
    ],
)
def test_bad_input_is_named(message, prompts, change):
    with pytest.raises(UserError, match=message):
        generate(MODEL, prompts, **{"max_new_tokens": 1} | change)
