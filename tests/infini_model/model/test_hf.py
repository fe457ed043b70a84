"""Hugging Face folders of a Llama and of a LLaDA, beside `transformers` and after damage."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infini_model.model.hf import weights
from infini_model.model.hf.config import TokenIds, read_config, read_json
from infini_model.model.hf.weights import write_files
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.runtime.errors import CheckpointError

LENGTH = 24
TOKENS = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rope_theta": 5000.0,
    "initializer_range": 0.2,
}
# The fields of LLaDA-8B-Base, with a small shape; the last ones have no meaning here.
LLADA_FIELDS = json.loads("""{
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "activation_type": "silu",
    "alibi": false, "attention_dropout": 0.0, "attention_layer_norm": false,
    "bias_for_layer_norm": false, "block_group_size": 1, "block_type": "llama", "d_model": 32,
    "embedding_dropout": 0.0, "embedding_size": 50, "eos_token_id": 48, "include_bias": false,
    "include_qkv_bias": false, "init_std": 0.02, "input_emb_norm": false, "layer_norm_type": "rms",
    "layer_norm_with_affine": true, "mask_token_id": 49, "max_sequence_length": 24,
    "mlp_hidden_size": 48, "multi_query_attention": null, "n_heads": 4, "n_kv_heads": 4,
    "n_layers": 2, "pad_token_id": 48, "residual_dropout": 0.0, "rms_norm_eps": 1e-05, "rope": true,
    "rope_theta": 5000.0, "scale_logits": false, "vocab_size": 50, "weight_tying": false,
    "flash_attention": false, "init_fn": "mitchell"
}""")
# LLaDA's name for each part of a Llama's.
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
BLOCK = "model.transformer.blocks."


def theirs(**changes):
    torch.manual_seed(0)
    fields = SHAPE | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-6,
    }
    llama = LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()
    for parameter in llama.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return llama


def ours(**changes):
    return tiny_model(dtype=torch.float32, **SHAPE | {"segment_length": LENGTH} | changes)


def llada_name(name):
    for llama, llada in LLADA_NAMES.items():
        name = name.replace(llama, llada)
    return name


def write_llada(folder, llama=None):
    """A folder with the weights of a Llama, in LLaDA's form."""
    llama = llama or theirs(num_key_value_heads=4)
    folder.mkdir()
    fields = {"n_kv_heads": llama.config.num_key_value_heads}
    fields["weight_tying"] = llama.config.tie_word_embeddings
    (folder / "config.json").write_text(json.dumps(LLADA_FIELDS | fields))
    tensors = {llada_name(name): each.data for name, each in llama.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_llama(folder):
    ours().save_pretrained(folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def edit(folder, **changes):
    path = folder / "config.json"
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in tree.items() if v != "drop"}))


def assert_close(model, llama, tolerance=1e-5):
    torch.testing.assert_close(logits(model), logits(llama), rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("tie", "shard", "dtype"),
    [
        (False, "5GB", torch.float32),
        (True, "20KB", torch.float32),
        (False, "10KB", torch.bfloat16),
    ],
    ids=["one file", "tied, in shards", "bfloat16"],
)
def test_reads_what_transformers_writes(tmp_path, caplog, tie, shard, dtype):
    theirs(tie_word_embeddings=tie).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard != "5GB")
    model = InfiniLlama.from_pretrained(tmp_path, memory="linear")
    assert_close(model, llama)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: has no weights of a memory; initialised: gate -2, memory_key_shift 0"
    ]
    start = torch.tensor(-2.0).sigmoid().item()
    assert [heads.tolist() for heads in model.read_strengths()] == [[start] * 4] * 2
    assert model.config.segment_length == LENGTH
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie
    caplog.clear()
    other = InfiniLlama.from_pretrained(
        tmp_path, segment_length=8, memory="none", dtype=torch.bfloat16
    )
    assert not caplog.records
    assert (other.config.segment_length, other.config.memory) == (8, "none")
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, ()),
        ({"tie_word_embeddings": True, "head_dim": 16}, ()),
        # In the older and in the current fields, either of which is enough.
        ({"rope_scaling": LLAMA3}, ("rope_parameters",)),
        ({"rope_scaling": LLAMA3}, ("rope_scaling", "rope_theta")),
    ],
    ids=["plain", "tied, wide heads", "older scaling", "current scaling"],
)
def test_a_round_trip_through_transformers(tmp_path, changes, dropped):
    model = ours(memory="none", **changes)
    model.save_pretrained(tmp_path / "a")
    edit(tmp_path / "a", **dict.fromkeys(dropped, "drop"))
    assert InfiniLlama.from_pretrained(tmp_path / "a").config == model.config
    llama, report = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert type(llama) is LlamaForCausalLM
    assert not any(report.values())
    assert_close(model, llama)
    llama.save_pretrained(tmp_path / "b")
    again = InfiniLlama.from_pretrained(tmp_path / "b")
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": "linear"},
        {"memory": "delta", "memory_key_shift": False, "tie_word_embeddings": True},
        {"memory": "residual"},
        {
            "memory": "delta",
            "memory_query_shift": True,
            "bidirectional": True,
            "mask_token_id": 49,
            "rope_scaling": {name: LLAMA3[name] for name in LLAMA3 if name != "rope_type"},
        },
    ],
    ids=["linear", "delta", "residual", "bidirectional"],
)
def test_a_round_trip_with_memory(tmp_path, caplog, monkeypatch, changes):
    model, folder = ours(segment_length=5, **changes), tmp_path / "model"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(weights, "SHARD_BYTES", 20_000)
        write_files(folder, model.config, model.whole_tensors())
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert torch.equal(logits(InfiniLlama.from_pretrained(folder)), logits(model))
    model.save_pretrained(folder)  # replaces the shards
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    again = InfiniLlama.from_pretrained(folder)
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))
    assert not caplog.records
    plain = InfiniLlama.from_pretrained(folder, memory="none")
    (unread,) = (record.getMessage() for record in caplog.records)
    assert "not read, as the model has no use for it: " in unread
    assert not any(name.endswith(MEMORY_PARAMETERS) for name, _ in plain.named_parameters())


def test_a_llama_that_gets_a_residual_memory_is_bit_for_bit_what_it_was_in_segments(
    tmp_path, caplog
):
    theirs().save_pretrained(tmp_path)
    with_memory, without = (
        InfiniLlama.from_pretrained(tmp_path, segment_length=5, memory=memory)
        for memory in ("residual", "none")
    )
    assert torch.equal(logits(with_memory), logits(without))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "has no weights of a memory; initialised: memory_weight 0, memory_write_gate 0, "
        "memory_forget_gate 0, memory_key_shift 0.5"
    ]


def test_an_output_layer_of_a_folder_that_says_it_is_tied_is_kept(tmp_path, caplog):
    llama = theirs(tie_word_embeddings=False)
    llama.save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    model = InfiniLlama.from_pretrained(tmp_path, memory="none")
    assert_close(model, llama)
    assert not InfiniLlama.check_pretrained(tmp_path).tie_word_embeddings
    told = {record.getMessage() for record in caplog.records}
    assert len(told) == 1
    assert "lm_head.weight is not the embedding: it is kept" in told.pop()
    caplog.clear()
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert InfiniLlama.from_pretrained(tmp_path, memory="none").config.tie_word_embeddings
    assert not caplog.records


@pytest.mark.parametrize("memory", ["residual", "none"])
def test_a_llama_whose_window_holds_all_is_the_llama(tmp_path, memory):
    """Cut into three segments; by default with sinks, which then are in the window."""
    llama = theirs()
    llama.save_pretrained(tmp_path)
    cut = {"segment_length": LENGTH // 3, "memory": memory}
    model = InfiniLlama.from_pretrained(tmp_path, window_segments=2, **cut)
    assert model.config.window_sinks == 4
    assert_close(model, llama)
    chosen = InfiniLlama.from_pretrained(tmp_path, window_segments=1, window_sinks=0, **cut)
    assert chosen.config.window_sinks == 0
    # One segment fewer, and the sinks alone: the last segment is no longer the Llama's.
    for window, at_least in (({"window_segments": 1}, 2), ({"window_sinks": 3}, 1)):
        found = (logits(InfiniLlama.from_pretrained(tmp_path, **window, **cut)), logits(llama))
        same, other = ([x[:, : at_least * LENGTH // 3] for x in found], [x[:, -1] for x in found])
        torch.testing.assert_close(*same, rtol=1e-5, atol=1e-5)
        assert (other[0] - other[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("bidirectional", "part"),
    [
        (False, {"memory": "residual"}),
        (True, {"memory": "residual"}),
        (False, {"memory": "none", "window_segments": 2, "window_sinks": 1}),
    ],
)
def test_a_model_with_a_past_is_not_taken_for_a_llama_or_a_llada(tmp_path, bidirectional, part):
    mask = {"mask_token_id": 49} if bidirectional else {}
    model = ours(bidirectional=bidirectional, **part, **mask)
    model.save_pretrained(tmp_path / "m")
    assert read_json(tmp_path / "m" / "config.json")["model_type"] == "infini_llama"
    again = InfiniLlama.from_pretrained(tmp_path / "m")
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


def test_a_folder_of_a_memory_that_calls_itself_a_llama_is_read(tmp_path):
    model = ours(memory="residual")
    model.save_pretrained(tmp_path)
    edit(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    assert torch.equal(logits(InfiniLlama.from_pretrained(tmp_path)), logits(model))


def test_omitted_fields_have_hugging_faces_defaults(tmp_path):
    """The weights are small, since the norm's epsilon matters only for small activations."""
    theirs(initializer_range=1e-3).save_pretrained(tmp_path)
    left_out = ("rms_norm_eps", "head_dim", "initializer_range", "tie_word_embeddings")
    edit(tmp_path, **dict.fromkeys(left_out, "drop"))
    # Old folders have frequencies, which are computed.
    weights = tmp_path / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(load_file(weights) | frequencies, weights, metadata={"format": "pt"})
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(InfiniLlama.from_pretrained(tmp_path), llama, 1e-7)


@pytest.mark.parametrize(("kv_heads", "tied"), [(4, False), (2, True)])
def test_a_llada_is_a_llama_without_a_causal_mask(tmp_path, kv_heads, tied):
    fields = {"num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5}
    llama = theirs(attn_implementation="eager", **fields)
    folder = write_llada(tmp_path / "m", llama)
    with torch.no_grad():
        visible = llama(TOKENS, attention_mask=torch.zeros(2, 1, LENGTH, LENGTH)).logits
        causal = llama(TOKENS).logits
    assert (visible - causal)[:, :-1].abs().max() > 0.1  # the mask is in use
    for changes, expected in (({}, visible), ({"bidirectional": False}, causal)):
        model = InfiniLlama.from_pretrained(folder, **changes)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_the_fields_of_a_llada_become_the_model_config(tmp_path):
    llada = write_llada(tmp_path / "m")
    config = InfiniLlama.check_pretrained(llada)
    assert (config.bidirectional, config.memory, config.mask_token_id) == (True, "none", 49)
    assert (config.segment_length, config.rope_theta, config.vocab_size) == (LENGTH, 5000.0, 50)
    edit(llada, n_kv_heads=None, embedding_size=None, weight_tying="drop")
    config = InfiniLlama.check_pretrained(llada)
    assert (config.key_value_heads, config.vocab_size) == (4, 50)
    assert read_config(llada, {}).tie_word_embeddings  # LLaDA's default
    edit(llada, vocab_size=47, embedding_size=50)  # a padded embedding counts with all its rows
    assert InfiniLlama.check_pretrained(llada).vocab_size == 50


def test_reading_and_writing_a_llada_changes_no_field_and_no_tensor(tmp_path):
    llada = write_llada(tmp_path / "m")
    model, again = InfiniLlama.from_pretrained(llada), tmp_path / "again"
    again.mkdir()
    write_files(again, model.config, model.whole_tensors(), TokenIds(eos=48))
    tree = json.loads((again / "config.json").read_text())
    kept = {name: value for name, value in LLADA_FIELDS.items() if name in tree}
    assert {name: tree[name] for name in kept} == kept
    assert set(LLADA_FIELDS) - set(kept) == {"flash_attention", "init_fn"}
    before, after = (load_file(f / "model.safetensors") for f in (llada, again))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(("bidirectional", "tied"), [(True, False), (False, True)])
def test_a_larger_vocabulary_appends_mean_rows(tmp_path, bidirectional, tied):
    model = ours(memory="none", bidirectional=bidirectional, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "m")
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
    with pytest.raises(CheckpointError, match=r"weight: expected shape \[49, 32\], got \[50, 32\]"):
        InfiniLlama.check_pretrained(tmp_path / "m", vocab_size=49)


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (write_llama, {"model_type": "gpt2"}, "unsupported model_type 'gpt2'; supported: llama, "),
        (write_llama, {"hidden_size": "drop"}, "hidden_size is missing"),
        (write_llama, {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        (write_llama, {"head_dim": 7}, "head_dim must be even for the rotary embedding, not 7"),
        (write_llama, {"rope_scaling": "twice"}, "rope_parameters: holds str, needs a mapping"),
        (write_llama, {"infini_attention": {"segment_length": 0}}, "segment_length: Input should"),
        (write_llada, {"architectures": ["LLaDAMoE"]}, r"architectures is \['LLaDAMoE'\], only"),
        (write_llada, {"rope": False}, "rope is False, only True is supported"),
        (write_llada, {"block_type": "drop"}, "block_type is missing"),
        (write_llada, {"d_model": -32}, "d_model: Input should be greater than 0"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, write, changes, message):
    folder = write(tmp_path / "m")
    edit(folder, **changes)
    for read in (InfiniLlama.check_pretrained, InfiniLlama.from_pretrained):
        with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
            read(folder)


@pytest.mark.parametrize(
    ("write", "name", "tensor", "message"),
    [
        (write_llama, "model.norm.weight", None, "is missing"),
        (write_llama, "model.layers.1.self_attn.memory_weight", None, "is missing"),
        (write_llama, "extra", torch.zeros(1), "unexpected tensor"),
        (write_llama, "model.norm.weight", torch.zeros(31), r"expected shape \[32\], got \[31\]"),
        (
            write_llama,
            "model.norm.weight",
            torch.zeros(32, dtype=torch.float8_e4m3fn),
            "expected dtype F64, F32, F16, BF16, got F8_E4M3",
        ),
        (write_llada, f"{BLOCK}1.ff_out.weight", None, "is missing"),
        (write_llada, f"{BLOCK}0.attn_out.weight", torch.zeros(3), r"expected shape \[32, 32\]"),
        (write_llada, f"{BLOCK}0.q_norm.weight", torch.zeros(3), "unexpected tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_named_as_in_the_file(tmp_path, write, name, tensor, message):
    folder = write(tmp_path / "m")
    weights = folder / "model.safetensors"
    tensors = load_file(weights) | {name: tensor}
    save_file({name: each for name, each in tensors.items() if each is not None}, weights)
    for read in (InfiniLlama.check_pretrained, InfiniLlama.from_pretrained):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(folder)
        assert name in str(caught.value)


def test_damage_is_reported(tmp_path):
    folder = tmp_path / "m"

    def fails(message, **changes):
        with pytest.raises(CheckpointError, match=message) as caught:
            InfiniLlama.from_pretrained(folder, **changes)
        assert "\n" not in str(caught.value)

    fails(r"m/config\.json: cannot be read: No such file")
    write_llama(folder)
    fails("segment_length: Input should be a valid integer", segment_length="long")
    fails("segments: Extra inputs are not permitted", segments=1)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:1000], whole[:-8], b"", b"\x80\x04pickle" * 9):
        weights.write_bytes(damaged)
        fails(r"model\.safetensors: unreadable")
    weights.rename(folder / "pytorch_model.bin")
    fails(r"model\.safetensors: no such file; only weights in safetensors are read")
    index = folder / "model.safetensors.index.json"
    for tree, message in (
        ({}, "weight_map is missing"),
        ({"weight_map": {"a": "../a.safetensors"}}, "is not a plain file name"),
        ({"weight_map": {"a": "b.safetensors"}}, r"b\.safetensors: no such file"),
    ):
        index.write_text(json.dumps(tree))
        fails(message)
    for text, message in (("{", "invalid JSON"), ("[]", "holds list, needs a mapping")):
        (folder / "config.json").write_text(text)
        fails(message)
