"""Pretrained models of Llama's kind: each beside `transformers`, read, run and written back."""

import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from infini_model.config import LoraConfig
from infini_model.hf import InfiniLlamaForCausalLM
from infini_model.model.generate import generate
from infini_model.model.hf.config import read_config
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, ConfigError

LENGTH = 24
TOKENS = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "rope_theta": 5000.0,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# The fields of each beside `SHAPE`, and the class that its export opens as.
BASES = {
    "llama with biases": ("llama", {"attention_bias": True}, "Llama"),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}, "Llama"),
    # The length before scaling, beside the scaling as Phi-3 has it.
    "llama, yarn": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
        "Llama",
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}, "Llama"),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, "Qwen2"),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}, "Qwen2"),
    "qwen2, yarn by its numbers": (
        "qwen2",
        {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 2.0, "beta_slow": 0.5}},
        "Qwen2",
    ),
    "qwen3": ("qwen3", {"head_dim": 16}, "Qwen3"),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True}, "Qwen3"),
    "smollm3": (
        "smollm3",
        {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0, 1, 0]},
        "SmolLM3",
    ),
    "smollm3, yarn": ("smollm3", {"rope_scaling": YARN, "no_rope_layer_interval": 2}, "SmolLM3"),
    "olmo2": ("olmo2", {}, "Olmo2"),
}
EVERY_BASE = pytest.mark.parametrize("name", BASES)


def tree_of(name, **changes):
    """Return the config.json of such a model."""
    kind, fields, _ = BASES.get(name, (name, {}, None))
    return {"model_type": kind, **SHAPE, **fields, **changes}


def write_base(folder, name, **changes) -> PreTrainedModel:
    """Write such a model with random weights, as `transformers` does, and return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree_of(name, **changes)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = 0.0 if parameter_name.endswith("bias") else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    model.save_pretrained(folder)
    return model


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens).logits


def assert_same(ours, theirs, tokens=TOKENS):
    expected = logits(theirs, tokens)
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=1e-5, atol=2e-5)


@EVERY_BASE
def test_logits_and_generation_are_those_of_transformers(tmp_path, caplog, name):
    theirs = write_base(tmp_path / "base", name)
    ours = InfiniLlama.from_pretrained(tmp_path / "base", memory="none")
    assert not [each for each in caplog.records if each.name.startswith("infini_model")]
    assert_same(ours, theirs)
    prompt = TOKENS[:, :9]
    expected = theirs.generate(prompt, max_new_tokens=15, do_sample=False)[:, 9:]
    found = generate(ours, prompt.tolist(), max_new_tokens=15, temperature=0)
    assert found == expected.tolist()


SCALINGS = st.one_of(
    st.none(),
    st.builds(lambda factor: {"type": "linear", "factor": factor}, st.floats(1, 9)),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.floats(1, 9)},
        optional={
            "original_max_position_embeddings": st.integers(8, 64),
            "attention_factor": st.floats(0.5, 2),
            "beta_fast": st.floats(3, 40),
            "beta_slow": st.floats(1, 2),
        },
    ),
    st.builds(
        lambda length: {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": length,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        st.integers(8, 64),
    ),
)


@given(
    kind=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2"]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 4)]),
    fields=st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([6, 8, 16]),
            "num_hidden_layers": st.integers(1, 4),
            "no_rope_layer_interval": st.integers(1, 4),
            "rope_theta": st.floats(50, 1e6),
            "rope_scaling": SCALINGS,
            "rms_norm_eps": st.sampled_from([1e-6, 1e-3]),
            "tie_word_embeddings": st.booleans(),
            "sliding_window": st.sampled_from([None, 7, 64]),
            "use_sliding_window": st.booleans(),
        },
        optional={"attention_bias": st.booleans(), "max_window_layers": st.integers(0, 4)},
    ),
)
@settings(max_examples=120, derandomize=True)
def test_whatever_its_config_says_it_computes_what_transformers_does(kind, heads, fields):
    fields |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_base(Path(folder, "base"), kind, **fields)
        Path(folder, "base", "config.json").write_text(json.dumps(tree_of(kind, **fields)))
        ours = InfiniLlama.from_pretrained(Path(folder, "base"), memory="none")
    # Beyond a sliding window it is cut into segments.
    layers = getattr(theirs.config, "layer_types", None) or []
    slides = kind == "mistral" or "sliding_attention" in layers
    width = theirs.config.sliding_window if slides else None
    assert ours.config.segment_length == min(LENGTH, width or LENGTH)
    assert_same(ours, theirs, TOKENS[:, : ours.config.segment_length])


@EVERY_BASE
def test_its_export_opens_as_what_it_was(tmp_path, name):
    theirs = write_base(tmp_path / "base", name)
    ours = InfiniLlama.from_pretrained(tmp_path / "base", memory="none")
    ours.save_pretrained(tmp_path / "export")
    exported = tmp_path / "export"
    again, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert type(again).__name__ == f"{BASES[name][2]}ForCausalLM"
    assert not any(report.values())
    assert_same(again, theirs)
    assert InfiniLlama.check_pretrained(exported) == ours.config
    again.save_pretrained(tmp_path / "back")
    back = InfiniLlama.from_pretrained(tmp_path / "back", memory="none")
    assert back.config == ours.config
    assert torch.equal(logits(back), logits(ours))


@EVERY_BASE
def test_in_segments_it_is_itself_as_far_as_its_window_reaches(tmp_path, name):
    """At once, and token by token, with a memory that has learnt nothing yet."""
    theirs = write_base(tmp_path / "base", name)
    cut = {"segment_length": LENGTH // 3, "window_segments": 2, "memory": "residual"}
    ours = InfiniLlama.from_pretrained(tmp_path / "base", **cut)
    assert ours.config.window_sinks == 4
    assert_same(ours, theirs)
    with torch.no_grad():
        state, parts = ours.empty_state(2), []
        for chunk in TOKENS.split([5, 1, 1, 11, 6], dim=1):
            hidden, state = ours.extend(chunk, state)
            parts.append(ours.lm_head(hidden))
    torch.testing.assert_close(torch.cat(parts, 1), logits(theirs), rtol=1e-5, atol=3e-5)
    ours.save_pretrained(tmp_path / "export")
    assert InfiniLlama.check_pretrained(tmp_path / "export") == ours.config
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert isinstance(opened, InfiniLlamaForCausalLM)
    torch.testing.assert_close(logits(opened), logits(theirs), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2"])
def test_omitted_fields_have_the_defaults_of_transformers(tmp_path, kind):
    tree = {"vocab_size": 50, "intermediate_size": 48, "num_hidden_layers": 4}
    tree |= {"hidden_size": 1024, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **tree}))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), read_config(tmp_path, {})
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 32)
    assert ours.key_value_heads == theirs.num_key_value_heads
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    for name in ("rms_norm_eps", "tie_word_embeddings", "initializer_range"):
        assert getattr(ours, name) == getattr(theirs, name)
    longest = min(
        theirs.max_position_embeddings, getattr(theirs, "sliding_window", None) or 1 << 30
    )
    assert ours.segment_length == longest


@pytest.mark.parametrize(
    ("name", "given"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 0})],
)
def test_no_more_is_in_sight_than_the_sliding_window_of_the_base(tmp_path, name, given):
    theirs = write_base(tmp_path / "base", name, sliding_window=8, **given)
    ours = InfiniLlama.from_pretrained(tmp_path / "base", memory="none")
    assert ours.config.segment_length == 8
    assert_same(ours, theirs, TOKENS[:, :8])
    halves = {"segment_length": 4, "window_segments": 1}
    assert_same(InfiniLlama.from_pretrained(tmp_path / "base", **halves), theirs, TOKENS[:, :8])
    for beyond in ({"segment_length": 9}, {"segment_length": 4, "window_segments": 2}):
        with pytest.raises(CheckpointError, match=r"config\.json: sliding_window is 8 tokens, but"):
            InfiniLlama.check_pretrained(tmp_path / "base", **beyond)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": "head", "qkv_bias": True},
        {"post_norm": True},
        {"no_rope_layer_interval": 3, "qk_norm": "projection"},
        {"bidirectional": True, "mask_token_id": 49, "qkv_bias": True},
        {"bidirectional": True, "mask_token_id": 49, "rope_scaling": YARN},
        {"bidirectional": True, "mask_token_id": 49, "head_dim": 16},
    ],
)
def test_a_combination_that_no_base_has_calls_itself_our_own(tmp_path, changes):
    model = tiny_model(dtype=torch.float32, vocab_size=50, memory="none", **changes)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "infini_llama"
    again = InfiniLlama.from_pretrained(tmp_path)
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: Input"),
        ("qwen2", {"rope_scaling": YARN | {"mscale": 1.0}}, r"rope_scaling\.mscale: Extra inputs"),
        ("qwen2", {"rope_scaling": YARN | {"low_freq_factor": 1}}, "low_freq_factor: not with"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers: only 0 for every n-th"),
        ("smollm3", {"no_rope_layers": "some"}, "no_rope_layers: only 0 for every n-th"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu' is supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True, only False is supported"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ("llama", {"model_type": ["llama"]}, r"unsupported model_type \['llama'\]; supported: "),
        (
            "llama",
            {"rope_parameters": {"full_attention": YARN}},
            "rope_parameters.full_attention: ",
        ),
        ("qwen2", {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta must be above 1 for yarn"),
        ("mistral", {"sliding_window": 0}, "sliding_window: Input should be greater than 0"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window: Input should be a valid integer"),
        ("qwen2", {"layer_types": ["chunked_attention"]}, "layer_types.0: Input should be"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers: only 0 for every n-th"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(tmp_path, name, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **SHAPE, **changes}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path, {})


@pytest.mark.parametrize("name", ["qwen2", "qwen3 with biases", "olmo2"])
def test_adapters_beside_biases_and_norms_change_nothing_at_first_and_merge(tmp_path, name):
    theirs = write_base(tmp_path / "base", name).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "base")
    plain = InfiniLlama.from_pretrained(tmp_path / "base", memory="none")
    lora = LoraConfig(modules_to_save=("norm",))
    model = InfiniLlama.from_pretrained(tmp_path / "base", memory="none", lora=lora)
    assert torch.equal(logits(model), logits(plain))
    trained = {each for each, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in each or each.endswith("norm.weight") for each in trained)
    assert trained >= {each for each, _ in plain.named_parameters() if each.endswith("norm.weight")}
    with torch.autocast("cpu", torch.bfloat16):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    merged = model.whole_tensors()
    assert {n: t.shape for n, t in merged.items()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    model.save_pretrained(tmp_path / "merged")
    assert_same(InfiniLlama.from_pretrained(tmp_path / "merged", memory="none"), plain)


def test_a_module_to_save_that_the_model_lacks_is_refused():
    for shape, lacking in (({}, "q_norm"), ({"post_norm": True}, "input_layernorm")):
        lora = LoraConfig(modules_to_save=("norm", lacking))
        with pytest.raises(ConfigError, match=f"modules_to_save: .* has no module {lacking}"):
            InfiniLlama(tiny_config(**shape), lora=lora)
