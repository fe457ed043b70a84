"""Hugging Face folders, checked against `transformers` and after damage."""

import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import draw_memory_parameters, tiny_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from infini_model.model.hf_checkpoint import read_config, write_checkpoint
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
TOKENS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rope_theta": 5000.0,
    "initializer_range": 0.2,
}


def theirs(**changes):
    torch.manual_seed(0)
    fields = SHAPE | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "rms_norm_eps": 1e-6,
    }
    return LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()


def ours(**changes):
    torch.manual_seed(0)
    return InfiniLlama(tiny_config(**SHAPE | {"segment_length": 24} | changes))


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
    model = InfiniLlama.from_pretrained(tmp_path)
    assert_close(model, llama)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: no gate found; initialised to -2",
        f"{tmp_path}: no memory_key_shift found; initialised to 0",
    ]
    assert model.config.segment_length == 24
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie
    caplog.clear()
    other = InfiniLlama.from_pretrained(
        tmp_path, segment_length=8, memory="none", dtype=torch.bfloat16
    )
    assert not caplog.records
    assert (other.config.segment_length, other.config.memory) == (8, "none")
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tie", [False, True])
def test_a_round_trip_through_transformers(tmp_path, tie, caplog):
    model = ours(memory="none", tie_word_embeddings=tie)
    model.save_pretrained(tmp_path / "a")
    llama, report = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert type(llama) is LlamaForCausalLM
    assert not any(report.values())
    assert_close(model, llama)
    llama.save_pretrained(tmp_path / "b")
    again = InfiniLlama.from_pretrained(tmp_path / "b")
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))
    # Trained without a memory, it begins one as a Llama does.
    caplog.clear()
    begun = InfiniLlama.from_pretrained(tmp_path / "a", memory="linear")
    assert caplog.records[0].message == f"{tmp_path / 'a'}: no gate found; initialised to -2"
    gates = {gates.mean for gates in begun.gate_statistics()}
    assert gates == {torch.tensor(-2.0).sigmoid().item()}


@pytest.mark.parametrize(
    ("memory", "shift", "tie"), [("linear", True, False), ("delta", False, True)]
)
def test_a_round_trip_with_memory(tmp_path, caplog, memory, shift, tie):
    model = ours(segment_length=5, memory=memory, memory_key_shift=shift, tie_word_embeddings=tie)
    draw_memory_parameters(model)
    folder = tmp_path / "model"
    write_checkpoint(folder, model.config, dict(model.named_parameters()), shard_bytes=20_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    assert torch.equal(logits(InfiniLlama.from_pretrained(folder)), logits(model))
    model.save_pretrained(folder)  # replaces the shards
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    again = InfiniLlama.from_pretrained(folder)
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))
    assert not caplog.records
    plain = InfiniLlama.from_pretrained(folder, memory="none")
    assert not any(name.endswith("gate") for name, _ in plain.named_parameters())


def test_older_fields_and_stored_frequencies_are_read(tmp_path):
    llama = theirs()
    llama.save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters="drop", rope_theta=5000.0, rope_scaling=None)
    weights = tmp_path / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(load_file(weights) | frequencies, weights)
    model = InfiniLlama.from_pretrained(tmp_path)
    assert_close(model, llama)


OLDER_FIELDS = {"rope_parameters": "drop", "rope_theta": 5000.0, "rope_scaling": LLAMA3}


@pytest.mark.parametrize("changes", [{}, OLDER_FIELDS], ids=["current", "older"])
def test_llama3_scaling_is_read(tmp_path, changes):
    llama = theirs(rope_parameters=LLAMA3 | {"rope_theta": 5000.0})
    llama.save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    model = InfiniLlama.from_pretrained(tmp_path)
    assert_close(model, llama)
    # It is the scaling that makes them equal: low, middle and high frequencies all occur.
    plain = InfiniLlama.from_pretrained(tmp_path, rope_scaling=None)
    assert (logits(plain) - logits(llama)).abs().max() > 1e-3
    shares = model.model.sin[1, :4].arcsin() / plain.model.sin[1, :4].arcsin()
    assert shares[0] > 0.999
    assert shares[3] < 0.13
    assert ((shares > 0.13) & (shares < 0.99)).any()


@pytest.mark.parametrize("dropped", [("rope_parameters",), ("rope_scaling", "rope_theta")])
def test_llama3_scaling_is_written(tmp_path, dropped):
    """In the older and in the current fields, either of which is enough."""
    model = ours(memory="none", rope_scaling=LLAMA3)
    model.save_pretrained(tmp_path / "a")
    edit(tmp_path / "a", **dict.fromkeys(dropped, "drop"))
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert_close(model, llama)
    llama.save_pretrained(tmp_path / "b")
    again = InfiniLlama.from_pretrained(tmp_path / "b")
    assert again.config == model.config
    assert torch.equal(logits(again), logits(model))


def test_an_explicit_head_dim_is_kept(tmp_path):
    llama = theirs(head_dim=16)
    llama.save_pretrained(tmp_path / "a")
    model = InfiniLlama.from_pretrained(tmp_path / "a", memory="none")
    assert model.config.head_dim == 16
    assert_close(model, llama)
    model.save_pretrained(tmp_path / "b")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert_close(back, llama)


def test_omitted_fields_have_hugging_faces_defaults(tmp_path):
    """The weights are small, since the norm's epsilon matters only for small activations."""
    theirs(initializer_range=1e-3).save_pretrained(tmp_path)
    left_out = ("rms_norm_eps", "head_dim", "initializer_range", "tie_word_embeddings")
    edit(tmp_path, **dict.fromkeys(left_out, "drop"))
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = InfiniLlama.from_pretrained(tmp_path)
    assert_close(model, llama, 1e-7)


def test_bf16_stays_bf16(tmp_path):
    model = ours(memory="none").bfloat16()
    tensors = dict(model.named_parameters())
    write_checkpoint(tmp_path, model.config, tensors, shard_bytes=9000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.bfloat16}
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = InfiniLlama.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in llama.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, tensors[name])
        assert torch.equal(again.get_parameter(name), tensors[name])
    wide = InfiniLlama.from_pretrained(tmp_path)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.lm_head.weight.bfloat16(), model.lm_head.weight)


def test_other_files_are_not_deleted(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which would be lost"):
        ours().save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; llama and llada are read"),
        ({"hidden_size": "drop"}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size: Input should be greater than 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 7}, "head_dim must be even for the rotary embedding, not 7"),
        ({"attention_bias": True}, "attention_bias is True, only False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_scaling": "twice"}, "rope_parameters holds 'twice', needs a mapping"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_scaling\.factor: Field required"),
        (
            {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.5}},
            r"rope_scaling\.partial_rotary_factor: Extra inputs are not permitted",
        ),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4 must be below"),
        ({"infini_attention": {"segment_length": 0}}, "segment_length: Input should be greater"),
        ({"infini_attention": 3}, "infini_attention holds 3, needs a mapping"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, changes, message):
    ours().save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path / "m", {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (
            lambda t: t.pop("model.layers.1.self_attn.gate"),
            r"tensor model\.layers\.1\.self_attn\.gate is missing",
        ),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected tensor extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"tensor model\.norm\.weight: expected shape \[32\], got \[31\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.float8_e4m3fn)}),
            r"tensor model\.norm\.weight: expected dtype F64, F32, F16, BF16, got F8_E4M3",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    ours().save_pretrained(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match=message):
        InfiniLlama.from_pretrained(tmp_path / "m")


def test_damage_is_reported(tmp_path):
    folder = tmp_path / "m"
    with pytest.raises(CheckpointError, match=r"m/config\.json: no such file"):
        InfiniLlama.from_pretrained(folder)
    ours().save_pretrained(folder)
    with pytest.raises(CheckpointError, match="segment_length: Input should be a valid integer"):
        InfiniLlama.from_pretrained(folder, segment_length="long")
    with pytest.raises(CheckpointError, match="segments: Extra inputs are not permitted"):
        InfiniLlama.from_pretrained(folder, segments=1)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:1000], whole[:-8], b"", b"\x80\x04pickle" * 9):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: unreadable") as caught:
            InfiniLlama.from_pretrained(folder)
        assert "\n" not in str(caught.value)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        InfiniLlama.from_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    for tree, message in (
        ({}, "weight_map is missing"),
        ({"weight_map": {"a": "../a.safetensors"}}, "is not a plain file name"),
        ({"weight_map": {"a": "b.safetensors"}}, r"b\.safetensors: no such file"),
    ):
        index.write_text(json.dumps(tree))
        with pytest.raises(CheckpointError, match=message):
            InfiniLlama.from_pretrained(folder)
    for text, message in (("{", "invalid JSON"), ("[]", "holds list, needs a mapping")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            InfiniLlama.from_pretrained(folder)
