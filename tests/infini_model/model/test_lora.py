"""The model with adapters: what it computes, what is trained, what is merged."""

import json

import pytest
import torch
from llamas import BESIDE, write_llama
from tiny_models import draw_memory_parameters
from torch.utils.flop_counter import FlopCounterMode

from infini_model.config import LoraConfig
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.runtime.errors import CheckpointError
from infini_model.training.metrics import flops_per_token

MEMORIES = pytest.mark.parametrize("memory", ["linear", "residual"])
DORA = LoraConfig(use_dora=True, target_modules=("q_proj", "o_proj", "up_proj"))
EVERYTHING = LoraConfig(
    r=3,
    target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    modules_to_save=("embed_tokens", "norm"),
)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def llama(request, tmp_path):
    """A Llama whose weights are exact in 16 bits."""
    tied = {"tie_word_embeddings": request.param}
    return write_llama(tmp_path / "llama", dtype=torch.bfloat16, **tied)


def adapted(llama, lora, **changes):
    """A model whose adapters do something."""
    model = InfiniLlama.from_pretrained(llama, lora=lora, **BESIDE | changes)
    torch.manual_seed(6)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B.weight"):
            torch.nn.init.normal_(parameter, std=0.1)
        if name.endswith("lora_magnitude_vector"):
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
    return model


@MEMORIES
@pytest.mark.parametrize("lora", [LoraConfig(), EVERYTHING, DORA])
def test_new_adapters_change_nothing_and_frozen_matrices_take_16_bits(llama, lora, memory):
    tokens = torch.randint(260, (2, 40))
    plain = InfiniLlama.from_pretrained(llama, **BESIDE | {"memory": memory})
    model = InfiniLlama.from_pretrained(llama, lora=lora, **BESIDE | {"memory": memory})
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    model(tokens, labels=tokens).loss.backward()
    plain(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        is_memory = name.endswith(MEMORY_PARAMETERS)
        is_saved = lora is EVERYTHING and ("norm" in name or "embed_tokens" in name)
        assert parameter.requires_grad == ("lora_" in name or is_memory or is_saved)
        assert (parameter.grad is not None) == parameter.requires_grad
        is_wide = parameter.requires_grad or parameter.ndim == 1
        assert parameter.dtype == (torch.float32 if is_wide else torch.bfloat16)
        if is_memory or is_saved:
            torch.testing.assert_close(parameter.grad, expected[name])


def test_the_seed_draws_the_adapters_as_peft_does(llama):
    def drawn(seed):
        torch.manual_seed(seed)
        model = InfiniLlama.from_pretrained(llama, lora=LoraConfig(), **BESIDE)
        return model.get_parameter("model.layers.1.self_attn.o_proj.lora_A.weight")

    assert torch.equal(drawn(1), drawn(1))
    # Uniform with the variance 1 / (3 · in_features).
    assert drawn(1).abs().max().item() == pytest.approx(32**-0.5, rel=0.1)


@pytest.mark.parametrize("lora", [EVERYTHING, DORA])
def test_whole_tensors_are_the_merged_model(llama, tmp_path, lora):
    model, before = adapted(llama, lora), InfiniLlama.from_pretrained(llama, **BESIDE)
    q_proj = model.model.layers[0].self_attn.q_proj
    expected = (
        q_proj.weight + lora.lora_alpha / lora.r * q_proj.lora_B.weight @ q_proj.lora_A.weight
    )
    if lora.use_dora:
        rows = torch.nn.functional.normalize(expected, dim=1)
        expected = q_proj.lora_magnitude_vector[:, None] * rows
    whole = model.whole_tensors()["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(whole, expected.detach().to(torch.bfloat16), rtol=1e-2, atol=0)
    model.save_pretrained(tmp_path / "merged")
    merged = InfiniLlama.from_pretrained(tmp_path / "merged")
    assert merged.lora is None
    tokens = torch.randint(260, (2, 40))
    with torch.no_grad():
        ours, theirs, unadapted = (each(tokens).logits for each in (model, merged, before))
    assert (ours - theirs).abs().mean() < 0.02 * (ours - unadapted).abs().mean()


@MEMORIES
def test_generation_is_that_of_the_whole_sequence(llama, memory):
    """Caches and memories are as wide as the activations, not as the frozen weights."""
    model = adapted(llama, LoraConfig(), memory=memory).eval()
    draw_memory_parameters(model)
    prompt = torch.randint(260, (1, 37))
    (new,) = generate(model, prompt.tolist(), max_new_tokens=20, temperature=0)
    sequence = torch.cat((prompt, torch.tensor([new])), dim=1)
    with torch.no_grad():
        likeliest = model(sequence).logits.argmax(-1)
    assert likeliest[0, 36:-1].tolist() == new


def test_the_flops_of_frozen_matrices_match_those_executed(llama):
    lora = LoraConfig(modules_to_save=("embed_tokens",))
    model = InfiniLlama.from_pretrained(llama, segment_length=16, memory="none", lora=lora)
    tokens = torch.randint(260, (3, 32))
    with FlopCounterMode(display=False) as counter:
        model(tokens).logits.sum().backward()
    executed = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    # A query attends to 8 keys on average, in scores and values; times 3 with backward.
    local = 3 * 2 * 2 * 32 * 8 * 2
    assert executed == (flops_per_token(model, 32) - local) * tokens.numel()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"bias": "all"}, "bias is 'all', only 'none' is supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', only 'LORA' is supported"),
        ({"target_modules": ["wq"]}, "target_modules.0: got 'wq': input should be 'q_proj'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path names no weights"),
    ],
)
def test_another_adapter_is_refused(llama, tmp_path, changes, complaint):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(llama)} | changes)
    )
    with pytest.raises(CheckpointError) as caught:
        InfiniLlama.from_pretrained(llama, adapter=tmp_path)
    assert f"adapter_config.json: {complaint}" in str(caught.value)
