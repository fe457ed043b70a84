"""Generation against one full pass of the model per token."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import draw_memory_parameters, tiny_config
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from infini_model.config import LoraConfig
from infini_model.model.generation.causal import generate, read_prompts, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.lora import initial_adapters
from infini_model.model.precision import PRECISIONS, Operands
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


@given(st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=14), min_size=1, max_size=4))
@settings(max_examples=15, derandomize=True)
def test_greedy_batches_equal_full_passes(prompts):
    new = generate(MODEL, prompts, max_new_tokens=7, temperature=0)
    assert new == [greedy(MODEL, prompt, 7) for prompt in prompts]


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


@KINDS
def test_rows_are_sampled_independently(memory, shift):
    model, settings_ = build(memory, shift), {"max_new_tokens": 10, "temperature": 1.5, "seed": 3}
    prompts = [[1, 2, 3, 4, 5, 6], [7] * 13, [8, 9]]
    rows = generate(model, prompts, **settings_)
    assert generate(model, prompts[:1], **settings_) == rows[:1]
    for row, prompt in enumerate(prompts):
        others = [[0], [1, 1], [5] * 9]
        others[row] = prompt
        assert generate(model, others, **settings_)[row] == rows[row]
    same = generate(model, [prompts[0]] * 3, **settings_)
    assert len(set(map(tuple, same))) == 3


def test_a_prompt_may_be_a_tensor():
    prompts = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])
    new = generate(MODEL, prompts, max_new_tokens=6, temperature=0)
    assert new == generate(MODEL, prompts.tolist(), max_new_tokens=6, temperature=0)


def test_stream_equals_generate():
    settings_ = {"max_new_tokens": 9, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 4}
    prompts = [[1, 2, 3], [4]]
    steps = list(stream(MODEL, prompts, **settings_))
    rows = generate(MODEL, prompts, **settings_)
    assert [list(row) for row in zip(*steps, strict=True)] == rows
    assert rows == generate(MODEL, prompts, **settings_)
    assert rows != generate(MODEL, prompts, **settings_ | {"seed": 5})


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


def test_zero_new_tokens():
    assert generate(MODEL, [[1], [2]], max_new_tokens=0) == [[], []]


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


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_generation_in_16_bits_computes_what_a_full_pass_does(memory):
    """Prompts of several lengths, read in segments, and then a token by itself."""
    model = build(memory).float()
    model.precision = PRECISIONS["bf16"]
    prompts = [[1, 2, 3], list(range(10)), [4] * 13]
    ids, lengths = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True), [3, 10, 13]
    logits, state = read_prompts(model, ids, torch.tensor(lengths))
    newest = torch.tensor([7, 8, 9])
    with torch.inference_mode(), model.precision.autocast(torch.device("cpu")):
        hidden, _ = model.advance(newest[:, None], state)
        after = model.lm_head(hidden[:, -1])
        for row, prompt in enumerate(prompts):
            whole = model(torch.tensor([[*prompt, int(newest[row])]])).logits[0]
            assert logits.dtype == whole.dtype == torch.bfloat16
            scale = whole.float().abs().max()
            assert (logits[row] - whole[-2]).float().abs().max() <= 0.05 * scale
            assert (after[row] - whole[-1]).float().abs().max() <= 0.05 * scale


class MatrixCasts(TorchDispatchMode):
    """Counts the casts of the matrices of a model."""

    def __init__(self, model):
        super().__init__()
        self.matrices = {p.data_ptr() for p in model.parameters() if p.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            is_cast = result.dtype != args[0].dtype
            self.count += is_cast and args[0].data_ptr() in self.matrices
        return result


def in_16_bits(lora=None, **changes):
    torch.manual_seed(3)
    model = InfiniLlama(tiny_config(initializer_range=0.4, **changes), lora=lora)
    if lora is not None:
        drawn = {name: torch.randn_like(t) for name, t in initial_adapters(model).items()}
        model.assign(dict(model.named_parameters()) | drawn)
    draw_memory_parameters(model)
    model.precision = PRECISIONS["bf16"]
    return model


def by_autocast(model, prompt, new):
    """Greedy tokens and the logits of each, as autocast casts the weights in each pass."""
    logits, state = read_prompts(model, prompt, torch.tensor([prompt.size(1)]))
    tokens, every = [], [logits]
    with torch.inference_mode(), model.precision.autocast(torch.device("cpu")):
        for _ in range(new):
            token = logits.argmax(-1)
            tokens.append(int(token))
            hidden, state = model.advance(token[:, None], state)
            logits = model.lm_head(hidden[:, -1])
            every.append(logits)
    return tokens, every


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": "delta"},
        {"memory": "none"},
        {"tie_word_embeddings": True},
        {"lora": LoraConfig(target_modules=("q_proj", "down_proj"))},
    ],
)
def test_weights_in_16_bits_are_cast_once_and_give_the_bits_of_autocast(changes):
    model, prompt = in_16_bits(**changes), torch.arange(10).view(1, -1)
    before = [*model.named_parameters(remove_duplicate=False)]
    tokens, logits = by_autocast(model, prompt, 6)
    with Operands(model, model.precision):
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.model.embed_tokens.weight is dict(before)["model.embed_tokens.weight"]
        again, same = by_autocast(model, prompt, 6)
    assert tokens == again
    assert all(map(torch.equal, logits, same))
    generated = stream(model, prompt, max_new_tokens=6, temperature=0)
    assert next(generated) == tokens[:1]
    after = [*model.named_parameters(remove_duplicate=False)]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))
    with MatrixCasts(model) as casts:
        assert [token for (token,) in generated] == tokens[1:]
    assert casts.count == 0
    with MatrixCasts(model) as casts:
        by_autocast(model, prompt, 1)
    assert casts.count > 0


def test_float64_is_generated_in_float64_whatever_the_precision():
    model = in_16_bits().double()
    with Operands(model, model.precision):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
