"""Generation by block diffusion: from segment to segment, with a state that does not grow."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.config import UnmaskingConfig
from infini_model.model.generation import unmasking
from infini_model.model.generation.unmasking import unmask
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

VOCABULARY, LENGTH = 20, 4
MASK = VOCABULARY - 1
GREEDY = {"block_length": 1}


@pytest.fixture(params=["linear", "delta"])
def model(request):
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "mask_token_id": MASK,
        "bidirectional": True,
        "memory": request.param,
        "memory_query_shift": True,
        "initializer_range": 0.5,
    }
    model = InfiniLlama(tiny_config(**shape)).double()
    draw_memory_parameters(model)
    return model


def prompt_of(tokens):
    return torch.randint(MASK, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def run(model, prompt, new, settings=None, **options):
    settings = UnmaskingConfig(**settings or {})
    blocks = unmask(model, prompt, max_new_tokens=new, settings=settings, **options)
    return [token for block in blocks for token in block]


@pytest.mark.parametrize("prompt", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("new", [1, 4, 13])
@pytest.mark.parametrize("settings", [{}, {"block_length": 3}, {"steps": 2}])
def test_nothing_stays_masked_whatever_the_lengths(model, prompt, new, settings):
    tokens = run(model, prompt_of(prompt), new, settings, temperature=1.0)
    assert len(tokens) == new
    assert MASK not in tokens


@pytest.mark.parametrize("prompt", [0, 3, 4, 10])
def test_it_fills_the_noisy_stream_given_the_clean_one(model, prompt):
    """One token at a time, as a pass over everything written so far predicts it."""
    known = prompt_of(prompt)
    for _ in range(11):
        here = len(known)
        clean = torch.tensor([known + [1] * (-here % LENGTH or LENGTH)])
        noisy = clean.clone()
        noisy[0, here:] = MASK
        logits = model.lm_head(model.noisy_hidden(noisy, clean))[0, here].detach()
        logits[MASK] = -torch.inf
        known.append(int(logits.argmax()))
    assert run(model, known[:prompt], 11, GREEDY) == known[prompt:]


def test_prompts_are_read_in_parts(model, monkeypatch):
    prompt = prompt_of(45)
    whole = run(model, prompt, 9, GREEDY)
    monkeypatch.setattr(unmasking, "PREFILL_TOKENS", 2 * LENGTH)
    assert run(model, prompt, 9, GREEDY) == whole


def test_a_seed_decides_the_text(model):
    texts = [run(model, [1, 2], 16, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_an_end_of_text_ends_it(model):
    end = run(model, [1, 2], 40, temperature=1.0)[20]
    tokens = run(model, [1, 2], 200, temperature=1.0, eos_token_id=end)
    assert tokens.index(end) == len(tokens) - 1 < 199


def test_guidance_is_refused(model):
    with pytest.raises(UserError, match="cfg_scale: needs a model without memory"):
        run(model, [1], 4, {"cfg_scale": 1.0})
