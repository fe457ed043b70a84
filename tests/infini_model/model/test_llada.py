"""LLaDA folders, written by the tests under LLaDA's names and checked against `transformers`."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import draw_memory_parameters, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

from infini_model.model.hf_checkpoint import TokenIds, describe_tokens, write_checkpoint
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError

LENGTH = 24
TOKENS = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
# The fields of LLaDA-8B-Base, with a small shape.
FIELDS = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 50,
    "eos_token_id": 48,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 49,
    "max_sequence_length": LENGTH,
    "mlp_hidden_size": 48,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 48,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 5000.0,
    "scale_logits": False,
    "use_cache": False,
    "vocab_size": 50,
    "weight_tying": False,
}
BLOCK = "model.transformer.blocks."
# Llama's name in `transformers`, for each part of LLaDA's.
LLAMA = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
OUTER = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}


def llama_name(name):
    """Llama's name of a tensor of LLaDA."""
    if name in OUTER:
        return OUTER[name]
    number, module, _ = name.removeprefix(BLOCK).split(".")
    return f"model.layers.{number}.{LLAMA[module]}.weight"


def draw_tensors(kv_heads=4, *, tied=False):
    """The tensors of a small LLaDA, by its names."""
    generator = torch.Generator().manual_seed(1)
    kv, hidden, wide = 8 * kv_heads, 32, 48
    shapes = {
        "model.transformer.wte.weight": (50, hidden),
        "model.transformer.ln_f.weight": (hidden,),
    }
    if not tied:
        shapes["model.transformer.ff_out.weight"] = (50, hidden)
    for number in range(2):
        parts = {
            **dict.fromkeys(("attn_norm", "ff_norm"), (hidden,)),
            **dict.fromkeys(("q_proj", "attn_out"), (hidden, hidden)),
            **dict.fromkeys(("k_proj", "v_proj"), (kv, hidden)),
            **dict.fromkeys(("ff_proj", "up_proj"), (wide, hidden)),
            "ff_out": (hidden, wide),
        }
        shapes |= {f"{BLOCK}{number}.{part}.weight": shape for part, shape in parts.items()}
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_fields(folder, **changes):
    tree = {name: value for name, value in (FIELDS | changes).items() if value != "drop"}
    (folder / "config.json").write_text(json.dumps(tree))


def write_llada(folder, tensors, **changes):
    folder.mkdir(exist_ok=True)
    write_fields(folder, **changes)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def llada(tmp_path):
    return write_llada(tmp_path / "llada", draw_tensors())


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def ours(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "segment_length": LENGTH, "memory": "none", "bidirectional": True}
    return InfiniLlama(tiny_config(**fields | {"initializer_range": 0.2} | changes))


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, True)])
def test_logits_are_those_of_a_llama_without_a_causal_mask(tmp_path, kv_heads, tied):
    tensors = draw_tensors(kv_heads, tied=tied)
    folder = write_llada(tmp_path / "m", tensors, n_kv_heads=kv_heads, weight_tying=tied)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-5,
            rope_theta=5000.0,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).double()
    loaded = llama.load_state_dict({llama_name(n): t for n, t in tensors.items()}, strict=False)
    assert loaded.missing_keys == (["lm_head.weight"] if tied else [])
    assert not loaded.unexpected_keys
    with torch.no_grad():
        visible = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.float64)
        theirs = llama(TOKENS, attention_mask=visible).logits
        causal = llama(TOKENS).logits
    model = InfiniLlama.from_pretrained(folder, dtype=torch.float64)
    torch.testing.assert_close(logits(model), theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - causal)[:, :-1].abs().max() > 0.1  # the mask is in use
    as_llama = InfiniLlama.from_pretrained(folder, dtype=torch.float64, bidirectional=False)
    torch.testing.assert_close(logits(as_llama), causal, rtol=1e-5, atol=1e-5)


def test_the_fields_become_the_model_config(llada):
    config = InfiniLlama.check_pretrained(llada)
    assert (config.bidirectional, config.memory, config.mask_token_id) == (True, "none", 49)
    assert (config.segment_length, config.rope_theta, config.vocab_size) == (LENGTH, 5000.0, 50)
    assert InfiniLlama.check_pretrained(llada, segment_length=8).segment_length == 8
    write_fields(llada, n_kv_heads=None, embedding_size=None, weight_tying="drop", vocab_size=50)
    config = InfiniLlama.check_pretrained(llada)
    assert (config.key_value_heads, config.vocab_size) == (4, 50)
    assert config.tie_word_embeddings  # LLaDA's default
    write_fields(llada, vocab_size=47)  # a padded embedding counts with all its rows
    assert InfiniLlama.check_pretrained(llada).vocab_size == 50


@pytest.mark.parametrize(("tied", "shard"), [(False, 1 << 30), (True, 9000)])
def test_a_bidirectional_model_with_a_memory_is_read_back(tmp_path, caplog, tied, shard):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    memory = {"memory": "delta", "memory_query_shift": True, "segment_length": 8}
    model = ours(mask_token_id=49, tie_word_embeddings=tied, rope_scaling=scaling, **memory)
    draw_memory_parameters(model)
    folder, parameters = tmp_path / "m", dict(model.named_parameters())
    write_checkpoint(folder, model.config, parameters, shard_bytes=shard)
    assert (folder / "model.safetensors.index.json").exists() is (shard == 9000)
    again = InfiniLlama.from_pretrained(folder)
    assert again.config == model.config
    for name, parameter in parameters.items():
        assert torch.equal(again.get_parameter(name), parameter)
    assert not caplog.records


def test_reading_and_writing_changes_no_field_and_no_tensor(llada, tmp_path):
    InfiniLlama.from_pretrained(llada).save_pretrained(tmp_path / "again")
    describe_tokens(tmp_path / "again", TokenIds(bos=None, eos=48))
    tree = json.loads((tmp_path / "again" / "config.json").read_text())
    kept = {name: value for name, value in FIELDS.items() if name in tree}
    assert {name: tree[name] for name in kept} == kept
    left_out = {"alibi_bias_max", "attention_layer_norm_with_affine", "flash_attention"}
    left_out |= {"init_cutoff_factor", "init_device", "init_fn", "mlp_ratio", "precision"}
    assert set(FIELDS) - set(kept) == left_out | {"rope_full_precision", "use_cache"}
    generation = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 48}
    before, after = (load_file(f / "model.safetensors") for f in (llada, tmp_path / "again"))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["llama", "llada", "tied llada"])
def test_a_larger_vocabulary_appends_mean_rows(tmp_path, form):
    tied = form == "tied llada"
    model = ours(bidirectional=form != "llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "m")
    InfiniLlama.check_pretrained(tmp_path / "m", vocab_size=53)
    larger = InfiniLlama.from_pretrained(
        tmp_path / "m", vocab_size=53, bidirectional=True, mask_token_id=50
    )
    assert larger.config.vocab_size == 53
    assert (larger.lm_head.weight is larger.model.embed_tokens.weight) is tied
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before, after = (each.state_dict()[name] for each in (model, larger))
        assert torch.equal(after[:50], before)
        torch.testing.assert_close(after[50:], before.mean(0).expand(3, -1))
    larger.save_pretrained(tmp_path / "larger")
    assert torch.equal(logits(InfiniLlama.from_pretrained(tmp_path / "larger")), logits(larger))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_another_number_of_rows_is_an_error_unless_asked_for(tmp_path, bidirectional):
    ours(bidirectional=bidirectional).save_pretrained(tmp_path / "m")
    output = "model.transformer.ff_out" if bidirectional else "lm_head"
    with pytest.raises(CheckpointError, match=rf"{output}\.weight: expected shape \[49, 16\]"):
        InfiniLlama.check_pretrained(tmp_path / "m", vocab_size=49)
    path = tmp_path / "m" / "config.json"
    sizes = dict.fromkeys(("vocab_size", "embedding_size"), 52)
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(CheckpointError, match=r"expected shape \[52, 16\], got \[50, 16\]"):
        InfiniLlama.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LLaDAMoEModelLM"]}, r"architectures is \['LLaDAMoEModelLM'\], only"),
        ({"include_bias": True}, "include_bias is True, only False is supported"),
        ({"alibi": True}, "alibi is True, only False is supported"),
        ({"rope": False}, "rope is False, only True is supported"),
        ({"block_type": "sequential"}, "block_type is 'sequential', only 'llama' is supported"),
        ({"layer_norm_type": "default"}, "layer_norm_type is 'default', only 'rms' is supported"),
        ({"activation_type": "swiglu"}, "activation_type is 'swiglu', only 'silu' is supported"),
        ({"attention_layer_norm": True}, "attention_layer_norm is True, only False is supported"),
        ({"scale_logits": True}, "scale_logits is True, only False is supported"),
        ({"block_type": "drop"}, "block_type is missing"),
        ({"d_model": None}, "d_model is missing"),
        ({"d_model": -32}, "d_model: Input should be greater than 0"),
        ({"n_kv_heads": 3}, "num_attention_heads 4 is not a multiple of"),
    ],
)
def test_a_variant_that_is_not_supported_is_named(llada, changes, message):
    write_fields(llada, **changes)
    for read in (InfiniLlama.check_pretrained, InfiniLlama.from_pretrained):
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
            read(llada)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{BLOCK}1.ff_out.weight", None, "is missing"),
        ("model.transformer.ff_out.weight", None, "is missing"),
        (f"{BLOCK}0.attn_out.weight", torch.zeros(3), r"expected shape \[32, 32\]"),
        (f"{BLOCK}0.q_norm.weight", torch.zeros(3), "unexpected tensor"),
        ("model.norm.weight", torch.zeros(32), "unexpected tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named_as_in_the_file(llada, name, tensor, message):
    tensors = load_file(llada / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, llada / "model.safetensors")
    for read in (InfiniLlama.check_pretrained, InfiniLlama.from_pretrained):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(llada)
        assert name in str(caught.value)


def test_only_safetensors_are_read(llada):
    (llada / "model.safetensors").rename(llada / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"there is pytorch_model\.bin, but only weights in"):
        InfiniLlama.check_pretrained(llada)


def test_an_infini_llama_begins_from_a_llada(llada, caplog):
    changes = {"bidirectional": False, "memory": "linear", "segment_length": 8}
    model = InfiniLlama.from_pretrained(llada, **changes)
    assert [record.message for record in caplog.records] == [
        f"{llada}: no gate found; initialised to -2",
        f"{llada}: no memory_key_shift found; initialised to 0",
    ]
    assert logits(model).isfinite().all()
