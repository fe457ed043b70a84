"""Trainings of adapters: saved, resumed, evaluated, and opened by `peft`."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from commands import stage
from curves import curve, repeatable, weights
from llamas import BESIDE, from_weights, recorded, write_llama
from local_hub import Repository, serve_hub
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from stopping import StopAfter
from trainings import on_two_ranks
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
    begun = from_weights(config, llama, **beside)
    training = begun.training.model_dump() | {"lora": lora}
    return type(begun).model_validate(begun.model_dump() | {"training": training})


def loss_of_first_step(config, dataset, run_dir):
    train(config, dataset, recorded(config, run_dir))
    return curve(run_dir, "validation/loss")[0]


@pytest.mark.parametrize("lora", [LORA, LONG], ids=["lora", "long"])
def test_a_training_begins_with_the_loss_of_its_weights_and_learns(
    make_config, llama, dataset, tmp_path, lora
):
    run_dir = tmp_path / "run"
    base = loss_of_first_step(from_weights(make_config(), llama), dataset, tmp_path / "full")
    assert loss_of_first_step(adapting(make_config(), llama, lora), dataset, run_dir) == base
    losses = curve(run_dir, "validation/loss")
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


@pytest.mark.parametrize("changes", [{}, {"launch": {"gradient_checkpointing": True}}])
def test_a_stopped_training_resumes_to_the_same_bits(
    make_config, llama, dataset, tmp_path, changes
):
    config = adapting(make_config(**changes), llama, LONG)
    whole = recorded(config, tmp_path / "whole")
    train(config, dataset, whole)
    run_dir = recorded(config, tmp_path / "run")
    assert train(config, dataset, run_dir, [StopAfter(6)]).stopped_by == signal.SIGTERM
    train(config, dataset, run_dir)
    assert repeatable(run_dir) == repeatable(whole)
    assert weights(run_dir) == weights(whole)


def _train(config, dataset, run_dir):
    train(config, dataset, run_dir)


@pytest.mark.parametrize(
    ("strategy", "precision", "rounding"),
    [
        pytest.param("ddp", "fp32", 5e-5, marks=pytest.mark.story),
        pytest.param("fsdp", "fp32", 5e-5, marks=pytest.mark.story),
        pytest.param("fsdp", "bf16", 2e-2, marks=pytest.mark.story),
    ],
)
def test_two_ranks_give_the_curve_of_one_and_resume_to_the_same_bits(
    make_config, llama, dataset, tmp_path, strategy, precision, rounding
):
    def config(batch_size):
        sections = {
            "training": {"batch_size": batch_size, "precision": precision},
            "checkpoint": {"save_steps": 4, "save_total_limit": 9},
            "launch": {"strategy": strategy},
        }
        return adapting(make_config(**sections), llama, LONG)

    one, two = recorded(config(8), tmp_path / "one"), recorded(config(4), tmp_path / "two")
    train(config(8), dataset, one)
    on_two_ranks(_train, config(4), dataset, two)
    for metric in ("train/loss", "validation/loss", "test/loss"):
        assert curve(two, metric) == pytest.approx(curve(one, metric), abs=rounding)
    again = shutil.copytree(two, tmp_path / "again")
    for step in (8, 12):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    on_two_ranks(_train, config(4), dataset, again)
    assert repeatable(again) == repeatable(two)
    assert weights(again) == weights(two)


@pytest.mark.parametrize("tied", [False, True])
def test_peft_opens_the_adapter_with_the_same_logits(make_config, dataset, tmp_path, tied):
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16, tie_word_embeddings=tied)
    config = adapting(make_config(), llama, LONG, memory="none")
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    tokens = torch.randint(260, (3, 16))
    with torch.no_grad():
        ours = load_model(run_dir / "model")(tokens).logits
        base = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
        before = base(tokens).logits
        theirs = PeftModel.from_pretrained(base, run_dir / "model")(tokens).logits
        found = AutoPeftModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found(tokens).logits, ours, rtol=1e-4, atol=1e-4)
    assert (ours - before).abs().max() > 0.05


def test_peft_opens_the_adapter_of_a_model_with_a_memory(make_config, llama, dataset, tmp_path):
    """One segment is the Llama, so there the logits are the same."""
    config = adapting(make_config(), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    tokens = torch.randint(260, (3, 16))
    with torch.no_grad():
        ours = load_model(run_dir / "model")(tokens).logits
        model = AutoPeftModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
        torch.testing.assert_close(model(tokens).logits, ours, rtol=1e-4, atol=1e-4)


def test_an_evaluation_has_the_loss_of_the_training(make_config, llama, dataset, tmp_path):
    config = adapting(make_config(), llama, LONG)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir)
    subject = Subject(run_dir, dataset, config)
    assert subject.model.lora == config.training.lora
    assert subject.score("validation").loss == pytest.approx(
        curve(run_dir, "validation/loss")[12], rel=1e-6
    )


def test_frozen_weights_that_are_gone_or_changed_stop_a_resumption(
    make_config, llama, dataset, tmp_path
):
    config = adapting(make_config(), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(6)])
    write_llama(llama, rope_theta=5e3)
    with pytest.raises(CheckpointError, match=r"llama: has other weights than those the run began"):
        train(config, dataset, run_dir)
    shutil.rmtree(llama)
    with pytest.raises(CheckpointError, match=r"llama: is gone; training\.lora needs"):
        train(config, dataset, run_dir)
    with pytest.raises(ConfigError, match=r"base_model_name_or_path: .*llama is not a folder"):
        Subject(run_dir, dataset, config)


def test_a_run_resumes_with_no_other_adapters(make_config, llama, dataset, tmp_path):
    config = adapting(make_config(), llama, LORA)
    run_dir = recorded(config, tmp_path / "run")
    train(config, dataset, run_dir, [StopAfter(6)])
    for lora, change in (
        (None, r"training\.lora is {.*'r': 4, .*}, not None"),
        (LORA | {"r": 8}, r"training\.lora\.r is 4, not 8"),
    ):
        with pytest.raises(CheckpointError, match=rf"{change}; choose another run\.name"):
            train(adapting(make_config(), llama, lora), dataset, run_dir)


def test_adapters_are_no_initial_weights_until_merged(make_config, llama, dataset, tmp_path):
    config = adapting(make_config(), llama, LORA)
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
    file.write_text(dump_config(adapting(make_config(), "team/llama", LORA)))
    with serve_hub() as hub:
        files = {path.name: path.read_bytes() for path in llama.iterdir()}
        hub.repositories["team/llama"] = Repository(files)
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        env["HF_HOME"] = str(tmp_path / "one")
        stage("weights", file, "--run-dir", run_dir, env=env)
        command = [sys.executable, "-m", "infini_model.training", "--config", file]
        subprocess.run([*command, "--dataset", dataset, "--run-dir", run_dir], env=env, check=True)
        said = json.loads((run_dir / "model" / "adapter_config.json").read_text())
        assert said["base_model_name_or_path"] == "team/llama"
        assert said["revision"] == hub.repositories["team/llama"].commit
        env["HF_HOME"] = str(tmp_path / "two")
        load = [sys.executable, "-c", LOAD, run_dir / "model"]
        found = subprocess.run(load, env=env, check=True, capture_output=True, text=True)
        assert found.stdout == "linear\n"
        assert list((tmp_path / "two").rglob("model.safetensors"))
