"""Generation by unmasking: nothing stays masked, ends come last, and a seed decides the text."""

import itertools

import pytest
import torch

from infini_model.config import ModelConfig, UnmaskingConfig
from infini_model.model.generation.unmasking import unmask
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

VOCABULARY, CONTEXT = 20, 48
MASK, END = VOCABULARY - 1, 0
PROMPT = [3, 1, 4, 1, 5]


def make_model(**changes):
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "segment_length": CONTEXT,
        "memory": "none",
        "bidirectional": True,
        "mask_token_id": MASK,
        "initializer_range": 0.5,
    }
    return InfiniLlama(ModelConfig(**shape | changes))


class Scripted(InfiniLlama):
    """Has the same logits at each position in every step, and keeps the sequences it was shown."""

    def __init__(self, config, logits):
        super().__init__(config)
        self.logits, self.seen = logits, []
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.eye(VOCABULARY))

    def hidden(self, input_ids, state=None, reset=None):
        self.seen.append(input_ids[0].tolist())
        return self.logits[None, : input_ids.size(1)].expand(len(input_ids), -1, -1), None


def run(model, prompt=PROMPT, new=24, settings=None, **options):
    settings = UnmaskingConfig(**settings or {})
    blocks = unmask(model, prompt, max_new_tokens=new, settings=settings, **options)
    return [token for block in blocks for token in block]


@pytest.mark.parametrize("block_length", [1, 7, 24, 100])
@pytest.mark.parametrize("steps", [None, 1, 5, 24, 1000])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("confidence_threshold", [None, 0.3])
def test_nothing_stays_masked(block_length, steps, remasking, confidence_threshold):
    settings = {
        "block_length": block_length,
        "steps": steps,
        "remasking": remasking,
        "confidence_threshold": confidence_threshold,
    }
    tokens = run(make_model(), settings=settings, temperature=1.0)
    assert len(tokens) == 24
    assert MASK not in tokens


def test_blocks_of_one_token_are_greedy_from_left_to_right():
    model, ids = make_model(), list(PROMPT)
    for number in range(12):
        masked = torch.tensor([ids + [MASK] * (12 - number)])
        logits = model(masked).logits[0, len(ids)].detach()
        logits[MASK] = -torch.inf
        ids.append(int(logits.argmax()))
    assert run(model, new=12, settings={"block_length": 1}) == ids[len(PROMPT) :]


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
    assert run(model, [], 16, {"block_length": 8}, eos_token_id=END) == [10, 10, 10, END]
    with_end = [ids for ids in model.seen if END in ids]
    assert all(MASK not in ids[:3] for ids in with_end)
    assert len(model.seen) <= 8  # neither positions behind the end nor the second block


def test_a_seed_decides_the_text():
    model = make_model()
    texts = [run(model, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_guidance_by_an_empty_prompt_changes_nothing_and_by_a_prompt_something():
    model = make_model()
    plain, guided = ({"cfg_scale": scale} for scale in (0.0, 4.0))
    assert run(model, [], settings=plain) == run(model, [], settings=guided)
    assert run(model, settings=plain) != run(model, settings=guided)


def test_few_steps_take_few_passes_and_a_threshold_saves_more():
    shown = []
    for settings in ({"steps": 6}, {"steps": 6, "confidence_threshold": 0.5}):
        logits = torch.zeros(24, VOCABULARY)
        logits[:, 7] = 10.0
        model = Scripted(make_model().config, logits)
        run(model, [], settings=settings | {"block_length": 12})
        shown.append(len(model.seen))
    assert shown == [6, 2]


def test_the_context_limits_the_new_tokens():
    assert len(run(make_model(), [1] * 40)) == CONTEXT - 40


def test_mistakes_are_told_in_one_line():
    model = make_model()
    with pytest.raises(UserError, match=r"48 tokens leave no room in .* context of 48$"):
        run(model, [1] * CONTEXT)
    with pytest.raises(UserError, match="token 99 is outside the vocabulary of 20"):
        run(model, [99])
    with pytest.raises(UserError, match="causal"):
        run(make_model(bidirectional=False, mask_token_id=None))
