"""Generation, token by token and by unmasking, against plain passes of the model.

Unmasking by masked diffusion is in a context of one segment, by block diffusion from segment to
segment with a state that does not grow.
"""

import itertools

import pytest
import torch
from tiny_models import tiny_model

from infini_model.config import SampleConfig
from infini_model.model import generate as generation
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import UserError


def causal_model(memory="linear", shift=True):
    return tiny_model(3, memory=memory, memory_key_shift=shift, initializer_range=0.4)


CAUSAL = causal_model()


def greedy(model, prompt, count):
    """The greedy continuation by full passes, without any state."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("memory", "shift"),
    [("linear", True), ("linear", False), ("delta", True), ("residual", True), ("none", False)],
)
def test_prompts_are_read_in_any_chunks(memory, shift, monkeypatch):
    """One segment at a time, two, or all at once, then token by token; one prompt or several."""
    model = causal_model(memory, shift)
    tokens = torch.randint(11, (25,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [tokens, tokens[:8], tokens[:3]]
    expected = [greedy(model, prompt, 9) for prompt in prompts]
    for prefill_tokens in (1, 8, 64):
        monkeypatch.setattr(generation, "PREFILL_TOKENS", prefill_tokens)
        for rows in (1, 3):
            new = generate(model, prompts[:rows], max_new_tokens=9, temperature=0)
            assert new == expected[:rows]


def test_a_row_ends_with_the_end_token():
    prompts = [[1, 2, 3], [4, 4], [7]]
    free = generate(CAUSAL, prompts, max_new_tokens=12, temperature=0)
    end = free[0][1]
    cut = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert generate(CAUSAL, prompts, max_new_tokens=12, temperature=0, eos_token_id=end) == cut
    assert len(cut[0]) <= 2


def test_sampling_respects_its_settings():
    prompt = [[1, 2, 3]]
    best = generate(CAUSAL, prompt, max_new_tokens=8, temperature=0)
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        assert generate(CAUSAL, prompt, max_new_tokens=8, seed=1, **narrow) == best
    with torch.no_grad():
        logits = CAUSAL(torch.tensor(prompt)).logits[0, -1]
    weights, order = (logits / 3.0).softmax(-1).sort(descending=True)
    in_nucleus = int((weights.cumsum(0) < 0.5).sum()) + 1
    for narrow, expected in (({"top_k": 3}, order[:3]), ({"top_p": 0.5}, order[:in_nucleus])):
        drawn = generate(CAUSAL, prompt * 300, max_new_tokens=1, temperature=3.0, **narrow)
        assert {row[0] for row in drawn} == set(expected.tolist())
    drawn = torch.tensor(generate(CAUSAL, prompt * 2000, max_new_tokens=1))[:, 0]
    observed = torch.bincount(drawn, minlength=11) / len(drawn)
    torch.testing.assert_close(observed.double(), logits.softmax(-1), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("message", "prompts", "change"),
    [
        ("prompts: expected at least one", [], {}),
        ("prompt 1: is empty", [[1], []], {}),
        ("prompt 0: token 11 is outside the vocabulary of 11", [[11]], {}),
        ("max_new_tokens: got -1", [[1]], {"max_new_tokens": -1}),
        ("temperature: got nan", [[1]], {"temperature": float("nan")}),
        ("top_k: got 0", [[1]], {"top_k": 0}),
        ("top_p: got 0.0", [[1]], {"top_p": 0.0}),
        ("seed: got -1", [[1]], {"seed": -1}),
    ],
)
def test_mistakes_are_named(message, prompts, change):
    with pytest.raises(UserError, match=message):
        generate(CAUSAL, prompts, **{"max_new_tokens": 1} | change)


VOCABULARY, CONTEXT, BLOCK = 20, 48, 4
MASK, END = VOCABULARY - 1, 0
PROMPT = [3, 1, 4, 1, 5]
GREEDY = {"block_length": 1}


def make_model(**changes):
    """A model for masked diffusion, or with a memory for block diffusion."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "num_attention_heads": 2,
        "segment_length": CONTEXT,
        "memory": "none",
        "bidirectional": True,
        "mask_token_id": MASK,
        "initializer_range": 0.5,
    }
    return tiny_model(**shape | changes)


@pytest.fixture(params=["linear", "delta", "residual"])
def block_model(request):
    shape = {"segment_length": BLOCK, "memory": request.param, "memory_query_shift": True}
    return make_model(**shape)


class Scripted(InfiniLlama):
    """Has the same logits at each position in every step, and keeps the sequences it was shown."""

    def __init__(self, config, logits):
        super().__init__(config)
        self.logits, self.seen = logits, []
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.eye(VOCABULARY))

    def hidden(self, input_ids, document_starts=None):
        self.seen.append(input_ids[0].tolist())
        return self.logits[None, : input_ids.size(1)].expand(len(input_ids), -1, -1)


def run(model, prompt=PROMPT, new=24, settings=None, temperature=0.0, **options):
    drawn = {"max_new_tokens": new, "temperature": temperature, "top_k": None}
    blocks = unmask(model, prompt, SampleConfig(unmasking=settings or {}, **drawn), **options)
    return [token for block in blocks for token in block]


def test_nothing_stays_masked(block_model):
    for block_length, steps in ((3, 2), (7, 5), (24, 1), (100, 1000)):
        settings = {"block_length": block_length, "steps": steps}
        for model in (make_model(), block_model):
            tokens = run(model, settings=settings, temperature=1.0)
            assert len(tokens) == 24
            assert MASK not in tokens


def test_blocks_of_one_token_are_greedy_from_left_to_right():
    model, ids = make_model(), list(PROMPT)
    for number in range(12):
        logits = model(torch.tensor([ids + [MASK] * (12 - number)])).logits[0, len(ids)].detach()
        logits[MASK] = -torch.inf
        ids.append(int(logits.argmax()))
    assert run(model, new=12, settings=GREEDY) == ids[len(PROMPT) :]


@pytest.mark.parametrize("prompt", [0, 3, 10])
def test_a_block_fills_the_noisy_stream_given_the_clean_one(block_model, monkeypatch, prompt):
    """One token at a time, as a pass over everything written so far predicts it."""
    monkeypatch.setattr(generation, "PREFILL_TOKENS", BLOCK)  # prompts are read in parts
    generator = torch.Generator().manual_seed(1)
    known = torch.randint(MASK, (prompt,), generator=generator).tolist()
    for _ in range(11):
        here = len(known)
        clean = torch.tensor([known + [1] * (-here % BLOCK or BLOCK)])
        noisy = clean.clone()
        noisy[0, here:] = MASK
        logits = block_model.lm_head(block_model.hidden(noisy, past_ids=clean))[0, here].detach()
        logits[MASK] = -torch.inf
        known.append(int(logits.argmax()))
    assert run(block_model, known[:prompt], 11, GREEDY) == known[prompt:]


def test_the_most_probable_prediction_stays_in_every_step():
    logits = torch.zeros(8, VOCABULARY)
    likely = [5.0, 9.0, 2.0, 7.0, 3.0, 8.0, 4.0, 6.0]
    for position, logit in enumerate(likely):
        logits[position, 10 + position] = logit
    model = Scripted(make_model().config, logits)
    assert run(model, [], 8) == list(range(10, 18))
    masked = [[i for i, token in enumerate(ids) if token == MASK] for ids in model.seen]
    kept = [(set(now) - set(after)).pop() for now, after in itertools.pairwise(masked)]
    assert kept == sorted(range(8), key=lambda i: -likely[i])[:-1]


def test_an_end_of_text_is_kept_last_and_ends_the_text():
    """It is by far the most probable at positions 3 to 7; what is before it is still written."""
    logits = torch.zeros(16, VOCABULARY)
    for position in range(16):
        logits[position, 10 if position < 3 else END] = 2.0 if position < 3 else 20.0
    model = Scripted(make_model().config, logits)
    assert run(model, [], 16, {"block_length": 8}, end_token_ids=(END,)) == [10, 10, 10, END]
    with_end = [ids for ids in model.seen if END in ids]
    assert all(MASK not in ids[:3] for ids in with_end)
    assert len(model.seen) <= 8  # neither positions behind the end nor the second block


def test_an_end_of_text_ends_blocks(block_model):
    end = run(block_model, [1, 2], 40, temperature=1.0)[20]
    tokens = run(block_model, [1, 2], 60, temperature=1.0, end_token_ids=(end,))
    assert tokens.index(end) == len(tokens) - 1 < 59


def test_a_seed_decides_the_text(block_model):
    for model in (make_model(), block_model):
        texts = [run(model, new=16, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
        assert texts[0] == texts[1] != texts[2]


def test_few_steps_take_few_passes():
    model = Scripted(make_model().config, torch.zeros(24, VOCABULARY))
    run(model, [], settings={"steps": 6, "block_length": 12})
    assert len(model.seen) == 6


def test_the_context_limits_the_new_tokens_and_mistakes_are_named():
    model = make_model()
    assert len(run(model, [1] * 40)) == CONTEXT - 40
    with pytest.raises(UserError, match=r"48 tokens leave no room in .* context of 48$"):
        run(model, [1] * CONTEXT)
    with pytest.raises(UserError, match="token 99 is outside the vocabulary of 20"):
        run(model, [99])
    with pytest.raises(UserError, match="causal"):
        run(make_model(bidirectional=False, mask_token_id=None))
