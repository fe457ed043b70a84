"""Trainings of adapters: saved, evaluated, refused, and opened by `peft`.

That one is the same when it is resumed or divided: `test_same_training.py`.
"""

import json
import os
import shutil
import sys

import pytest
import torch
from commands import run, stage
from curves import curve
from llamas import BESIDE, from_weights, recorded, write_llama
from local_hub import Repository, serve_hub
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from stopping import StopAfter
from trainings import with_adapters
from transformers import LlamaForCausalLM

from infini_model.config import dump_config
from infini_model.evaluation.subject import Subject
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.training.checkpoints.checkpoint import newest_checkpoint
from infini_model.training.checkpoints.loading import load_model
from infini_model.training.initial_weights import find_initial_weights
from infini_model.training.loop import train

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LONG = LORA | {"modules_to_save": ["embed_tokens", "norm"]}


@pytest.fixture
def llama(tmp_path):
    return write_llama(tmp_path / "llama", dtype=torch.bfloat16)


def adapting(config, llama, lora, **beside):
    """`config`, training adapters of a Llama."""
    return with_adapters(from_weights(config, llama, **beside), lora)


@pytest.mark.parametrize("lora", [LORA, LONG], ids=["lora", "long"])
def test_a_training_begins_with_the_loss_of_its_weights_and_saves_what_it_has_learnt(
    make_config, llama, dataset, tmp_path, lora
):
    run_dir, first = tmp_path / "run", from_weights(make_config(training={"max_steps": 1}), llama)
    train(first, dataset, recorded(first, tmp_path / "full"))
    config = adapting(make_config(), llama, lora)
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
    subject = Subject(run_dir, dataset, config)
    assert subject.model.lora == config.training.lora
    assert subject.score("validation").loss == pytest.approx(losses[12], rel=1e-6)


@pytest.mark.parametrize(("memory", "tied"), [("none", False), ("none", True), ("linear", False)])
def test_peft_opens_the_adapter_with_the_same_logits(make_config, dataset, tmp_path, memory, tied):
    """With a memory one segment is the Llama, so there the logits are the same."""
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    config = adapting(make_config(), llama, LONG if memory == "none" else LORA, memory=memory)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    tokens = torch.randint(260, (3, 16))
    with torch.no_grad():
        ours = load_model(run_dir / "model")(tokens).logits
        base = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
        before = base(tokens).logits
        named = PeftModel.from_pretrained(base, run_dir / "model")
        found = AutoPeftModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
        for theirs in (named, found):
            torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-4)
    assert (ours - before).abs().max() > 0.01


def test_a_run_resumes_with_no_other_adapters_or_frozen_weights(
    make_config, llama, dataset, tmp_path
):
    config = adapting(make_config(), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(2)])

    def expect(error, lora=LORA):
        with pytest.raises(CheckpointError, match=error):
            train(adapting(make_config(), tmp_path / "llama", lora), dataset, run_dir)

    expect(r"training\.lora is {.*'r': 4, .*}, not None; choose another run\.name", None)
    expect(r"training\.lora\.r is 4, not 8; choose another run\.name", LORA | {"r": 8})
    write_llama(llama, rope_theta=5e3)
    expect("llama: has other weights than those the run began")
    shutil.rmtree(llama)
    expect(r"llama: is gone; training\.lora needs")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path: .*llama is not a folder"):
        Subject(run_dir, dataset, config)


def test_adapters_are_no_initial_weights_until_merged(make_config, llama, dataset, tmp_path):
    config = adapting(make_config(training={"max_steps": 1}), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    with pytest.raises(ConfigError, match="is a LoRA adapter; infini export --merge makes"):
        find_initial_weights(from_weights(make_config(), run_dir / "model"))
    with pytest.raises(CheckpointError, match="it is a LoRA adapter: load the weights that it"):
        InfiniLlama.from_pretrained(run_dir / "model")
    load_model(run_dir / "model").save_pretrained(tmp_path / "merged")
    found = find_initial_weights(from_weights(make_config(), tmp_path / "merged"))
    assert InfiniLlama.from_pretrained(found.folder, **BESIDE).lora is None


LOAD = """
import sys
from pathlib import Path
from infini_model.training.checkpoints.loading import load_model
print(load_model(Path(sys.argv[1])).config.memory)
"""


@pytest.mark.story
def test_an_adapter_of_a_repository_names_it_and_its_commit(make_config, llama, dataset, tmp_path):
    """Any machine that has the adapter can then fetch what it adapts."""
    run_dir, file = tmp_path / "run", tmp_path / "config.yaml"
    config = adapting(make_config(training={"max_steps": 1}), "team/llama", LORA)
    file.write_text(dump_config(config))
    with serve_hub() as hub:
        files = {path.name: path.read_bytes() for path in llama.iterdir()}
        hub.repositories["team/llama"] = Repository(files)
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        stage("weights", file, "--run-dir", run_dir, env=env | {"HF_HOME": str(tmp_path / "one")})
        train(config, dataset, run_dir)
        said = json.loads((run_dir / "model" / "adapter_config.json").read_text())
        assert said["base_model_name_or_path"] == "team/llama"
        assert said["revision"] == hub.repositories["team/llama"].commit
        load = [sys.executable, "-c", LOAD, str(run_dir / "model")]
        found = run(load, env | {"HF_HOME": str(tmp_path / "two")})
        assert found.stdout == "linear\n", found.stderr
        assert list((tmp_path / "two").rglob("model.safetensors"))
