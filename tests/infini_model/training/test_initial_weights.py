"""Trainings that begin from weights, which they train or adapt: found, checked, recorded, resumed.

That one is the same when it is resumed or divided: `test_same_training.py`.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from commands import dataset_of, run, stage
from curves import curve
from llamas import BESIDE, SEGMENT, from_weights, recorded, write_llama
from local_hub import Repository, serve_hub
from peft import PeftModel
from safetensors.torch import load_file, save_file
from stopping import StopAfter
from transformers import LlamaForCausalLM

from infini_model.config import dump_config, validate
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import read_manifest
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.tokenizer import check_tokenizer
from infini_model.evaluation.context import CheckpointContext
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory.residual import Residual
from infini_model.model.memory.rule import SHIFTS
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import CheckpointError, ConfigError, UserError
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training.checkpoint import read_state
from infini_model.training.export import export_model, load_model
from infini_model.training.initial_weights import (
    InitialWeights,
    find_initial_weights,
    read_initial_weights,
    record_initial_weights,
)
from infini_model.training.mlflow_record import MlflowExporter
from infini_model.training.train import train

NORM = "model.norm.weight"
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LONG = LORA | {"modules_to_save": ["embed_tokens", "norm"]}
BLOCKS = {"objective": "block_diffusion", "max_steps": 1}
# One segment, as long as the window.
LLADA = {"hidden_size": 32, "segment_length": 64}


@pytest.fixture
def llama(tmp_path):
    return write_llama(tmp_path / "llama", dtype=torch.bfloat16)


@pytest.fixture
def config(make_config, llama):
    return from_weights(make_config(), llama)


def loss_of(model, windows):
    """Mean loss of a model over all windows of a split."""
    tokens = windows.gather(np.arange(len(windows))).tokens[:, 0].long()
    with torch.no_grad():
        return model(tokens[:, :-1], labels=tokens[:, 1:]).loss.item()


def change_norm(folder, tensor):
    """Replace the weight of the last norm in a folder; None removes it."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {NORM: tensor}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)


def test_a_training_begins_with_nearly_the_loss_of_the_llama_and_records_where_from(
    make_config, dataset, tmp_path
):
    """An eighth of the output from the memory hardly hurts a Llama that has learnt something."""
    train(make_config(model={"memory": "none"}), dataset, tmp_path / "before")
    llama = tmp_path / "before" / "model"
    config = from_weights(make_config(), llama)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    begun = curve(run_dir, "validation/loss")[0]
    windows = open_windows(dataset, "validation", config.packing, SEGMENT)
    asked = loss_of(InfiniLlama.from_pretrained(llama, **BESIDE), windows)
    assert begun == pytest.approx(asked, rel=1e-6)
    before = curve(tmp_path / "before", "validation/loss")
    assert begun != pytest.approx(before[12], rel=1e-6)
    assert begun == pytest.approx(before[12], rel=0.02)
    assert begun < before[0] - 0.5

    # The checkpoint has the whole shape, and the run its own settings.
    model = read_state(newest_checkpoint(run_dir)).config["model"]
    assert model["initial_weights"] is None
    assert (model["hidden_size"], model["vocab_size"], model["memory"]) == (32, 256, "linear")
    name = config.model.initial_weights
    assert f"initial_weights: {name}" in (run_dir / "config.yaml").read_text(encoding="utf-8")
    tags = MlflowExporter(run_dir, config, None)._origin()
    assert tags["initial_weights.fingerprint"] == read_initial_weights(run_dir).fingerprint


def test_block_diffusion_begins_from_weights_with_a_memory_and_shifts_its_queries(
    dataset, make_config, tmp_path
):
    """Of a LLaDA, whose memory is named, or of block diffusion, whose own is kept."""
    llada = make_config(model=LLADA, training=BLOCKS | {"objective": "masked_diffusion"})
    train(llada, dataset, tmp_path / "llada")
    blocks = make_config(model={"memory": "delta"}, training=BLOCKS)
    assert blocks.model.memory_query_shift is None
    train(blocks, dataset, tmp_path / "blocks")
    model = InfiniLlama.from_pretrained(tmp_path / "blocks" / "model")
    shape = model.config
    assert (shape.bidirectional, shape.memory, shape.memory_query_shift) == (True, "delta", True)
    assert (shape.segment_length, shape.mask_token_id, shape.vocab_size) == (16, 256, 257)
    shifts = model.get_parameter("model.layers.1.self_attn.memory.memory_query_shift")
    assert not torch.equal(shifts, torch.full((2,), 0.5))

    def memory_of(name, **model):
        weights = {"initial_weights": str(tmp_path / name / "model"), "segment_length": 16}
        config = validate(blocks.model_dump() | {"model": weights | model})
        run_dir = recorded(config, tmp_path / f"{name}-run")
        train(config, dataset, run_dir)
        shape = InfiniLlama.from_pretrained(run_dir / "model").config
        assert shape.memory_query_shift
        return shape.memory

    assert memory_of("llada", memory="linear") == "linear"
    assert memory_of("blocks") == "delta"
    with pytest.raises(ConfigError, match=r"^model.memory: missing; .* needs one$"):
        memory_of("llada")


def test_weights_are_trained_on_no_ids_of_another_tokenizer(make_config, dataset, tmp_path, caplog):
    """As many tokens are not the same ones; another file of the same ids is."""
    llama = write_llama(tmp_path / "llama", vocab_size=300)
    config = from_weights(make_config(training={"max_steps": 1}), llama)
    train(config, dataset, recorded(config, tmp_path / "without"))
    warned = f"model.initial_weights: {llama} brings no tokenizer to compare"
    assert caplog.text.count(warned) == 1

    train_tokenizer([["a text"]], 270).save(llama)
    refused = r": its tokenizer \(\w{12}\) gives other ids than that of .*/llama \(\w{12}\); data\."
    with pytest.raises(ConfigError, match=f"^{dataset}{refused}"):
        train(config, dataset, recorded(config, tmp_path / "refused"))
    knowing = from_weights(make_config(training={"max_steps": 1}), llama, ignore_tokenizer=True)
    train(knowing, dataset, recorded(knowing, tmp_path / "knowing"))

    # Another file and fingerprint, but the same ids.
    (tmp_path / "other").mkdir()
    tree = json.loads((llama / "tokenizer.json").read_text(encoding="utf-8"))
    tree["added_tokens"].append(tree["added_tokens"][0] | {"id": 271, "content": "<|unused|>"})
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    other, own = load_tokenizer(str(tmp_path / "other")), find_initial_weights(config).tokenizer
    assert other.fingerprint != own.fingerprint
    check_tokenizer("llama", own, other, "other")


def of_texts(config, texts, spec):
    """`config`, with a dataset of these texts that is to be made."""
    data = {"source": {"paths": [str(texts / "*.txt")]}, "tokenizer": {"spec": spec}}
    return validate(config.model_dump(mode="json") | {"data": data})


def test_no_dataset_is_made_with_another_tokenizer_than_that_of_the_weights(
    make_config, llama, text_files, tmp_path
):
    train_tokenizer([["a text"]], 258).save(llama)
    file = tmp_path / "config.yaml"

    def planned(weights, spec="bytes", **beside):
        config = of_texts(from_weights(make_config(), weights, **beside), text_files, spec)
        file.write_text(dump_config(config))
        return stage("plan", file, "--listing", stage("download", file)["listing"])

    refused = planned(llama)
    datasets = tmp_path / "output" / "datasets"
    said = rf"{datasets}/\S+: its tokenizer \(\w{{12}}\) gives other ids than that of {llama} \("
    assert re.match(said, refused["error"])
    assert refused["kind"] == "user"
    assert not (datasets / ".builds").exists()
    assert planned(llama, "model")["new"] == 1
    assert planned(llama, ignore_tokenizer=True)["new"] == 1
    # The weights may be on the machine that trains.
    assert planned(tmp_path / "elsewhere")["new"] == 1


def too_many_tokens(folder):
    write_llama(folder, vocab_size=250)
    train_tokenizer([["a text"]], 257).save(folder)


def test_the_tokenizer_of_an_export_of_bytes_has_no_file(
    make_config, dataset, text_files, tmp_path
):
    first = make_config(training={"max_steps": 1})
    train(first, dataset, tmp_path / "first")
    file, weights = tmp_path / "config.yaml", tmp_path / "first" / "model"
    config = of_texts(from_weights(make_config(), weights), text_files, "model")
    file.write_text(dump_config(find_initial_weights(config).pinned_in(config)))
    assert read_manifest(dataset_of(file)).tokenizer.spec == "bytes"


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (shutil.rmtree, {}, "model.initial_weights: {llama} is not a folder"),
        (lambda folder: change_norm(folder, None), {}, f"tensor {NORM} is missing"),
        (
            too_many_tokens,
            {"data": {"tokenizer": {"spec": "model"}}},
            "data.tokenizer.spec: the tokenizer of {llama} has 257 tokens, more than the 250 of",
        ),
        (
            lambda folder: None,
            {
                "training": {"objective": "masked_diffusion"},
                "model": {"initial_weights": "llama", "mask_token_id": 260},
            },
            "mask_token_id 260 is outside the vocabulary of 260",
        ),
        (
            lambda folder: None,
            {"model": {"initial_weights": "lla ma", "segment_length": 16}},
            "model.initial_weights: there is no folder lla ma, and on the hub: model lla ma: ",
        ),
    ],
    ids=["gone", "a tensor", "tokenizer", "mask token", "neither a folder nor on the hub"],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(
    config, llama, monkeypatch, tmp_path, spoil, changes, message
):
    monkeypatch.chdir(tmp_path)
    asked = validate(config.model_dump(mode="json") | changes)
    spoil(llama)
    with pytest.raises(UserError) as caught:
        find_initial_weights(asked)
    assert message.format(llama=llama) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_resumes_from_no_other_weights(make_config, config, dataset, tmp_path):
    other = from_weights(config, write_llama(tmp_path / "other", hidden_act="silu", rope_theta=5e3))
    missing = r"initial_weights\.json: is missing; python -m infini_model weights --config"
    with pytest.raises(CheckpointError, match=missing):
        train(config, dataset, tmp_path / "run")
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(1)])
    with pytest.raises(CheckpointError, match=r"initial_weights is '.*llama', not '.*other'"):
        train(other, dataset, run_dir)
    with pytest.raises(CheckpointError, match=r"began with sha256:.*choose another run\.name"):
        recorded(other, run_dir)
    train(make_config(training={"max_steps": 1}), dataset, tmp_path / "random")
    with pytest.raises(CheckpointError, match="began with random weights"):
        recorded(config, tmp_path / "random")


def test_a_run_belongs_to_the_content_of_its_weights(config, llama, tmp_path):
    def claim(config):
        found = find_initial_weights(config)
        with claim_run(config, "key", tmp_path, weights=found.fingerprint) as run_dir:
            record_initial_weights(run_dir, found)
            return run_dir

    first = claim(config)
    assert claim(config) == first
    copy = from_weights(config, shutil.copytree(llama, tmp_path / "copy"))
    assert claim(copy) == first
    change_norm(llama, torch.full((32,), 2.0))
    assert claim(config) != first
    run = config.run.model_copy(update={"name": first.name})
    with pytest.raises(ConfigError, match=r"holds another run \(model\.initial_weights is 'sha256"):
        claim(config.model_copy(update={"run": run}))


def test_adapters_begin_with_the_loss_of_their_weights_and_are_saved_alone(
    make_config, llama, dataset, tmp_path
):
    run_dir, first = tmp_path / "run", from_weights(make_config(training={"max_steps": 1}), llama)
    train(first, dataset, recorded(first, tmp_path / "full"))
    config = from_weights(make_config(), llama, LONG)
    train(config, dataset, recorded(config, run_dir))
    losses = curve(run_dir, "validation/loss")
    assert losses[0] == curve(tmp_path / "full", "validation/loss")[0]
    assert losses[12] < losses[0] - 0.02
    checkpoint = newest_checkpoint(run_dir)
    saved = load_file(checkpoint / "model" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved} >= {"lora_A", "lora_B"}
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == {
        name.removeprefix("base_model.model.")
        for file in ("adapter_model", "memory")
        for name in load_file(checkpoint / "model" / f"{file}.safetensors")
    }
    assert not (checkpoint / "model" / "model.safetensors").exists()
    subject = CheckpointContext(run_dir, dataset, config)
    assert subject.score("validation").loss == pytest.approx(losses[12], rel=1e-6)
    # Others begin from them only once they are merged.
    with pytest.raises(ConfigError, match="is a LoRA adapter; infini export --merge makes"):
        find_initial_weights(from_weights(make_config(), run_dir / "model"))
    with pytest.raises(CheckpointError, match="a LoRA adapter as adapter=FOLDER"):
        InfiniLlama.from_pretrained(run_dir / "model")


def test_the_memory_is_trained_alone(make_config, llama, dataset, tmp_path):
    config = from_weights(make_config(), llama, {"target_modules": []}, memory="residual")
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    losses = curve(run_dir, "validation/loss")
    assert losses[12] < losses[0]
    moments = load_file(newest_checkpoint(run_dir) / "optimizer.safetensors")
    assert all(".memory_" in name for name in moments)
    before, after = (
        InfiniLlama.from_pretrained(llama, segment_length=16, memory="residual"),
        load_model(run_dir / "model"),
    )
    changed = dict(after.named_parameters())
    changed = {n for n, p in before.named_parameters() if not torch.equal(p, changed[n].float())}
    assert {name.rpartition(".")[2] for name in changed} == {*Residual.parameter_names, SHIFTS[0]}
    exported = tmp_path / "exported"
    export_model(newest_checkpoint(run_dir), exported, load_tokenizer("bytes"), merge=True)
    assert InfiniLlama.from_pretrained(exported).config.memory == "residual"


def same_name(theirs, ours):
    """In memory peft's parameters have names of their own, and a magnitude is a module."""
    return theirs.replace(".default", "").startswith(f"base_model.model.{ours}")


@pytest.mark.parametrize(
    ("memory", "lora"),
    [
        ("none", LONG),
        ("linear", LORA | {"use_rslora": True, "lora_dropout": 0.2}),
        ("none", LORA | {"use_dora": True, "lora_dropout": 0.2}),
    ],
)
def test_peft_opens_the_adapter_with_the_same_logits(make_config, dataset, tmp_path, memory, lora):
    """With a memory one segment is the Llama, so there the logits are the same."""
    tied = lora is LONG
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    config = from_weights(make_config(training={"max_steps": 4}), llama, lora, memory=memory)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    tokens = torch.randint(260, (3, 16))
    mine, base = load_model(run_dir / "model"), LlamaForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        before = base.float()(tokens).logits
    peft = PeftModel.from_pretrained(base, run_dir / "model", is_trainable=True)
    # With dropout they draw the same numbers, and so have the same gradients.
    for is_trained in (False, True):
        found = []
        for each in (mine.train(is_trained), peft.train(is_trained)):
            torch.manual_seed(5)
            found.append(each(tokens).logits)
            found[-1].square().sum().backward()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert (found[0] - before).abs().max() > 0.01
    theirs = {name: p.grad for name, p in peft.named_parameters() if p.requires_grad}
    for name, parameter in mine.named_parameters():
        if "lora_" in name:
            (gradient,) = (theirs[each] for each in theirs if same_name(each, name))
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-3)


def test_a_run_resumes_with_no_other_adapters_or_frozen_weights(
    make_config, llama, dataset, tmp_path
):
    config = from_weights(make_config(), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(2)])

    def expect(error, lora=LORA):
        with pytest.raises(UserError, match=error):
            train(from_weights(make_config(), tmp_path / "llama", lora), dataset, run_dir)

    expect(r"training\.lora is {.*'r': 4, .*}, not None; choose another run\.name", None)
    expect(r"training\.lora\.r is 4, not 8; choose another run\.name", LORA | {"r": 8})
    write_llama(llama, rope_theta=5e3)
    expect("llama: has other weights than those the run began")
    shutil.rmtree(llama)
    expect(r"llama: is gone; training\.lora needs")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path: .*llama is not a folder"):
        CheckpointContext(run_dir, dataset, config)


LOAD = """
import sys
from pathlib import Path
from infini_model.training.export import export_model, load_model
print(load_model(Path(sys.argv[1])).config.memory)
"""


@pytest.mark.story
def test_weights_on_the_hub_are_pinned_to_a_commit_that_tokenizer_and_adapter_name(
    make_config, llama, text_files, tmp_path
):
    """Any machine that has the adapter can then fetch what it adapts."""
    run_dir, file = tmp_path / "run", tmp_path / "config.yaml"
    files = {path.name: path.read_bytes() for path in llama.iterdir()}
    files["tokenizer.json"] = train_tokenizer([["a text"]], 258).text.encode()
    config = from_weights(make_config(training={"max_steps": 1}), "team/llama", LORA)
    config = of_texts(config, text_files, "model")
    file.write_text(dump_config(config))
    with serve_hub() as hub:
        hub.repositories["team/llama"] = Repository(files)
        commit = hub.repositories["team/llama"].commit
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        here, elsewhere = (env | {"HF_HOME": str(tmp_path / name)} for name in ("one", "two"))
        reported = stage("weights", file, "--run-dir", run_dir, env=here)
        found = InitialWeights.model_validate(reported)
        assert (found.name, found.commit) == ("team/llama", commit)
        folder = find_initial_weights(from_weights(make_config(), llama))
        assert found.fingerprint == folder.fingerprint

        file.write_text(dump_config(found.pinned_in(config)))
        asked = len(hub.requests)
        listing = stage("download", file, env=here)["listing"]
        dataset = Path(stage("shard", file, "--listing", listing, env=here)["folder"])
        assert read_manifest(dataset).tokenizer.spec == f"team/llama@{commit}"
        file.write_text(dump_config(of_texts(found.pinned_in(config), text_files, "bytes")))
        refused = stage("plan", file, "--listing", listing, env=here)["error"]
        assert f"gives other ids than that of team/llama@{commit} (" in refused
        assert len(hub.requests) == asked

        train(config, dataset, run_dir)
        said = json.loads((run_dir / "model" / "adapter_config.json").read_text())
        assert (said["base_model_name_or_path"], said["revision"]) == ("team/llama", commit)
        loaded = run([sys.executable, "-c", LOAD, str(run_dir / "model")], elsewhere)
        assert loaded.stdout == "linear\n", loaded.stderr
