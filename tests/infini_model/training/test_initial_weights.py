"""Trainings that begin from a Llama: found, checked, recorded, loaded, resumed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from commands import stage
from curves import curve
from llamas import BESIDE, SEGMENT, from_weights, recorded, write_llama
from local_hub import Repository, serve_hub
from safetensors.torch import load_file, save_file
from stopping import StopAfter

from infini_model.config import dump_config, validate
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import read_manifest
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import CheckpointError, ConfigError, NonFiniteError, UserError
from infini_model.training.callbacks.mlflow_record import MlflowSink
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.initial_weights import (
    InitialWeights,
    find_initial_weights,
    read_initial_weights,
    record_initial_weights,
)
from infini_model.training.loop import train

NORM = "model.norm.weight"


@pytest.fixture
def llama(tmp_path):
    return write_llama(tmp_path / "llama")


@pytest.fixture
def config(make_config, llama):
    return from_weights(make_config(), llama)


def loss_of(model, windows):
    """Mean loss of a model over all windows of a split."""
    tokens = windows.gather(np.arange(len(windows))).tokens[:, 0].long()
    with torch.no_grad():
        return model(tokens[:, :-1], labels=tokens[:, 1:]).loss.item()


def change_tensors(folder, **changes):
    """Replace tensors of a folder, whose names have underscores for dots; None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        del tensors[name]
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def test_a_training_begins_with_nearly_the_loss_of_the_llama(make_config, dataset, tmp_path):
    """An eighth of the output from the memory hardly hurts a Llama that has learnt something."""
    train(make_config(model={"memory": "none"}), dataset, tmp_path / "before")
    llama = tmp_path / "before" / "model"
    config = from_weights(make_config(), llama)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    begun, windows = (
        curve(run_dir, "validation/loss")[0],
        open_windows(dataset, "validation", config.packing, SEGMENT),
    )
    asked = loss_of(InfiniLlama.from_pretrained(llama, **BESIDE), windows)
    assert begun == pytest.approx(asked, rel=1e-6)
    separate = loss_of(InfiniLlama.from_pretrained(llama), windows)
    assert separate == pytest.approx(curve(tmp_path / "before", "validation/loss")[12], rel=1e-6)
    assert begun != pytest.approx(separate, rel=1e-6)
    assert begun == pytest.approx(separate, rel=0.02)
    assert begun < curve(tmp_path / "before", "validation/loss")[0] - 0.5


def test_the_checkpoint_has_the_whole_shape_and_the_run_its_own_settings(config, dataset, tmp_path):
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    model = read_position(newest_checkpoint(run_dir)).config["model"]
    assert model["initial_weights"] is None
    assert (model["hidden_size"], model["vocab_size"], model["memory"]) == (32, 260, "linear")
    assert f"initial_weights: {config.model.initial_weights}" in (
        run_dir / "config.yaml"
    ).read_text(encoding="utf-8")
    tags = MlflowSink(run_dir, config, None)._origin()
    found = read_initial_weights(run_dir)
    assert tags["initial_weights.name"] == found.name == config.model.initial_weights
    assert tags["initial_weights.fingerprint"] == found.fingerprint


def too_many_tokens(folder):
    texts = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx"]
    tokenizer = train_tokenizer([texts], 300)
    assert tokenizer.vocab_size > 260
    tokenizer.save(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "model.initial_weights: {llama} is not a folder"),
        (lambda folder: change_tensors(folder, **{NORM: None}), f"tensor {NORM} is missing"),
        (
            lambda folder: change_tensors(folder, **{NORM: torch.ones(32, dtype=torch.int8)}),
            f"tensor {NORM}: expected dtype F64, F32, F16, BF16, got I8",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "there is pytorch_model.bin, but only weights in safetensors are read",
        ),
        (
            too_many_tokens,
            "data.tokenizer.spec: the tokenizer of {llama} has 300 tokens, more than the 260 of",
        ),
    ],
    ids=["gone", "missing", "dtype", "bin", "tokenizer"],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(config, llama, spoil, message):
    spec = {"data": config.data.model_dump() | {"tokenizer": {"spec": "model"}}}
    asked = validate(config.model_dump(mode="json") | spec)
    if spoil is not too_many_tokens:
        train_tokenizer([["a text"]], 258).save(llama)
    spoil(llama)
    with pytest.raises(UserError) as caught:
        find_initial_weights(asked)
    assert message.format(llama=llama) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_dataset_with_more_tokens_than_the_embedding_is_refused(make_config, dataset, tmp_path):
    config = from_weights(make_config(), write_llama(tmp_path / "small", vocab_size=200))
    run_dir = recorded(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"vocab_size of model\.initial_weights: 200 is less"):
        train(config, dataset, run_dir)


def test_a_rank_without_the_record_says_how_to_write_it(config, dataset, tmp_path):
    file, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "infini_model.training", "--config", file]
    command += ["--dataset", dataset, "--run-dir", run_dir]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "initial_weights.json: is missing; python -m infini_model weights --config" in line
    found = stage("weights", file, "--run-dir", run_dir)
    assert found["fingerprint"] == read_initial_weights(run_dir).fingerprint
    train(config, dataset, run_dir)


def test_a_run_resumes_from_no_other_weights(make_config, config, dataset, tmp_path):
    other = from_weights(config, write_llama(tmp_path / "other", hidden_act="silu", rope_theta=5e3))
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(1)])
    with pytest.raises(CheckpointError, match=r"initial_weights is '.*llama', not '.*other'"):
        train(other, dataset, run_dir)
    with pytest.raises(CheckpointError, match=r"began with sha256:.*choose another run\.name"):
        recorded(other, run_dir)
    train(make_config(training={"max_steps": 1}), dataset, tmp_path / "random")
    with pytest.raises(CheckpointError, match="began with random weights"):
        recorded(config, tmp_path / "random")


def test_the_state_before_a_nan_works_as_a_run_of_its_own(make_config, llama, dataset, tmp_path):
    hot = make_config(training={"learning_rate": 1e30}, logging={"debug": True})
    config = from_weights(hot, llama)
    run_dir = recorded(config, tmp_path / "run")
    with pytest.raises(NonFiniteError):
        train(config, dataset, run_dir)
    (folder,) = (run_dir / "debug").iterdir()
    with pytest.raises(NonFiniteError):
        train(config, dataset, folder)


def test_a_run_belongs_to_the_content_of_its_weights(config, llama, tmp_path):
    def claim(config, **named):
        found = find_initial_weights(config)
        with claim_run(config, "key", tmp_path, weights=found.fingerprint, **named) as run_dir:
            record_initial_weights(run_dir, found)
            return run_dir

    first = claim(config)
    assert claim(config) == first
    copy = from_weights(config, shutil.copytree(llama, tmp_path / "copy"))
    assert claim(copy) == first
    change_tensors(llama, **{NORM: torch.full((32,), 2.0)})
    assert claim(config) != first
    run = config.run.model_copy(update={"name": first.name})
    with pytest.raises(ConfigError, match=r"holds another run \(model\.initial_weights is 'sha256"):
        claim(config.model_copy(update={"run": run}))


@pytest.fixture
def hub(llama):
    with serve_hub() as server:
        files = {path.name: path.read_bytes() for path in llama.iterdir()}
        files |= {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "old/a.safetensors": b"a"}
        files["tokenizer.json"] = train_tokenizer([["a text"]], 258).text.encode()
        server.repositories["team/llama"] = Repository(files)
        server.repositories["team/bin"] = Repository({"config.json": b"{}", "model.bin": b"pickle"})
        yield server


@pytest.mark.story
def test_weights_on_the_hub_and_their_tokenizer_are_pinned_to_one_commit(
    hub, config, text_files, tmp_path
):
    home, file = tmp_path / "home", tmp_path / "config.yaml"
    env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    data = {"source": {"paths": [str(text_files / "*.txt")]}, "tokenizer": {"spec": "model"}}
    tree, commit = {"data": data}, hub.repositories["team/llama"].commit

    def ask(name):
        asked = validate(from_weights(config, name).model_dump(mode="json") | tree)
        file.write_text(dump_config(asked))
        return stage("weights", file, env=env), asked

    reported, asked = ask("team/llama")
    found = InitialWeights.model_validate(reported)
    assert (found.name, found.commit) == ("team/llama", commit)
    # That of a folder with the same content.
    assert found.fingerprint == find_initial_weights(config).fingerprint
    fetched = {path.name for path in home.rglob("snapshots/*/*")}
    assert fetched >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [name for name in fetched if name.endswith((".bin", ".py")) or name == "old"]
    before = len(hub.requests)
    assert ask(f"team/llama@{commit}")[0]["folder"] == reported["folder"]
    assert not [each for each in hub.requests[before:] if each.method == "GET"]
    assert "model team/bin: has no .safetensors files at" in ask("team/bin")[0]["error"]

    file.write_text(dump_config(found.pinned_in(asked)))
    listing = stage("download", file, env=env)["listing"]
    dataset = stage("shard", file, "--listing", listing, env=env)["folder"]
    assert read_manifest(Path(dataset)).tokenizer.spec == f"team/llama@{commit}"
