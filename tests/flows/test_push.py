"""`infini export --push`: a run on the hub, with a model card that tells how to use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import Done, infini, run
from huggingface_hub import ModelCard
from llamas import write_llama
from local_hub import TOKEN, LocalHub, Repository, serve_hub, sha256
from test_export import make_run, write_tokenizer

from infini_model.config import load_config
from infini_model.evaluation.report import evaluate_run
from infini_model.runtime.runs import dataset_here, settings_of_run

pytestmark = pytest.mark.story
REPOSITORY = "team/first"
EVALUATION = {"tasks": ["loss", "sample"], "max_windows": 2}
PUSHED = {".gitattributes", "README.md", "config.json", "generation_config.json"}
PUSHED |= {"model.safetensors", "plots/loss.png", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with serve_hub() as hub:
        yield hub


def evaluated(root: Path, tokenizer: str, memory: str, *overrides: str) -> Path:
    """Train and evaluate a run; returns its folder."""
    _, run_dir = make_run(root, root / "output", tokenizer, memory, *overrides)
    evaluate(run_dir)
    return run_dir


def evaluate(run_dir: Path) -> None:
    config = load_config(overrides=[*settings_of_run(run_dir), {"evaluation": EVALUATION}])
    evaluate_run(run_dir, Path(dataset_here(run_dir)), config)


def of_hub(hub: LocalHub, home: Path) -> dict[str, str]:
    """An environment in which the hub is this one, and large files are sent to it as to Git LFS."""
    own = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return os.environ | own | {"HF_TOKEN": TOKEN, "HF_HOME": str(home)}


def push(hub: LocalHub, run_dir: Path, *arguments: str, **env: str) -> Done:
    environment = of_hub(hub, run_dir.parent / "hub") | env
    return run(infini("export", run_dir, "--push", REPOSITORY, *arguments), environment)


def pushed(hub: LocalHub, run_dir: Path, *arguments: str) -> ModelCard:
    result = push(hub, run_dir, "--license", "apache-2.0", *arguments)
    assert result.returncode == 0, result.stderr
    assert f" to {hub.address}/{REPOSITORY}\n" in result.stdout
    return ModelCard(hub.repositories[REPOSITORY].files["README.md"].decode())


def error_of(result: Done) -> str:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = re.findall(r"^error: .*", result.stderr, re.MULTILINE)
    return str(line)


def use_as_told(card: ModelCard, hub: LocalHub, home: Path) -> str:
    """Run the card's example as a stranger would; returns what it prints."""
    (example,) = re.findall(r"^```python\n(.*?)^```", card.content, re.MULTILINE | re.DOTALL)
    result = run([sys.executable, "-c", example], of_hub(hub, home))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("memory", "form", "library"),
    [
        ("none", "huggingface", "transformers"),
        ("residual", "huggingface", "infini-model"),
        ("residual", "remote-code", "transformers"),
    ],
)
def test_a_pushed_run_is_used_as_its_card_says(
    memory: str, form: str, library: str, hub: LocalHub, tmp_path: Path
) -> None:
    run_dir = evaluated(tmp_path, str(write_tokenizer(tmp_path)), memory)
    card = pushed(hub, run_dir, "--format", form)
    files = hub.repositories[REPOSITORY].files
    assert files.keys() - {"modeling_infini_llama.py"} == PUSHED
    assert files["model.safetensors"] == (run_dir / "model" / "model.safetensors").read_bytes()
    assert len(use_as_told(card, hub, tmp_path / "theirs")) > len("Once upon a time")
    said = card.data.to_dict()
    assert (said["license"], said["library_name"]) == ("apache-2.0", library)
    assert said["pipeline_tag"] == "text-generation"
    measured = json.loads((run_dir / "evaluation.json").read_text())["metrics"]
    assert f"| `validation_loss` | {measured['evaluation/validation_loss']:.4f} |" in card.content
    assert "20 documents" in card.content
    assert f"(memory: {memory}, objective: causal), trained for 2 steps" in card.content
    assert "  max_steps: 2\n" in card.content
    # Neither where the files of the run lie nor what is in them.
    assert str(tmp_path) not in card.content
    assert "`*.txt`" in card.content
    report = (run_dir / "report.md").read_text()
    quoted = re.findall(r"^```text\n(.*?)\n```", report, re.MULTILINE | re.DOTALL)
    assert quoted
    assert all(text not in card.content for text in quoted)


def test_a_push_is_one_commit_that_replaces_the_model_alone(hub: LocalHub, tmp_path: Path) -> None:
    run_dir = evaluated(tmp_path, "bytes", "residual")
    pushed(hub, run_dir, "--format", "remote-code")
    repository = hub.repositories[REPOSITORY]
    repository.files |= {"notes.md": b"mine", "model-00001-of-00002.safetensors": b"old"}
    before = len(hub.requests)
    pushed(hub, run_dir)
    assert repository.files.keys() == PUSHED | {"notes.md"}
    commits = [each for each in hub.requests[before:] if "/commit/" in each.path]
    assert len(commits) == 1

    # By default large files go another way, for which the hub has a storage of its own.
    hub.xet_storage = tmp_path / "xet"
    sent = push(hub, run_dir, "--license", "apache-2.0", HF_HUB_DISABLE_XET="0")
    assert sent.returncode == 0, sent.stderr
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    assert repository.files["model.safetensors"] == sha256(weights).encode()
    assert any(path.is_file() for path in hub.xet_storage.rglob("xorbs/*"))
    assert not list((tmp_path / "output").glob(".tmp-*"))


def test_what_is_not_pushed_is_one_line_and_leaves_the_hub_as_it_was(
    hub: LocalHub, tmp_path: Path
) -> None:
    _, run_dir = make_run(tmp_path, tmp_path / "output", "bytes", "none")
    license_id = ("--license", "apache-2.0")
    assert error_of(push(hub, run_dir)).endswith("--push: needs a --license, such as apache-2.0")
    owned = run(infini("export", run_dir, "--push", "first", *license_id), of_hub(hub, tmp_path))
    assert error_of(owned) == "error: --push: got 'first'; takes OWNER/NAME"
    complaint = f"error: {run_dir.name}: has no report of step 2"
    assert error_of(push(hub, run_dir, *license_id)).startswith(complaint)
    evaluate(run_dir)
    denied = error_of(push(hub, run_dir, *license_id, HF_TOKEN="hf_other"))
    assert denied.startswith(f"error: --push {REPOSITORY}: access denied: log in")
    assert not hub.repositories
    unreachable = error_of(push(hub, run_dir, *license_id, HF_ENDPOINT="http://127.0.0.1:9"))
    assert "the hub cannot be reached" in unreachable
    pushed(hub, run_dir)
    files = hub.repositories[REPOSITORY].files
    unknown = error_of(push(hub, run_dir, "--license", "nonsense"))
    assert unknown.endswith('Invalid metadata in README.md. - "license" is unknown')
    hub.uploaded.clear()
    hub.busy = 9  # every upload of a file is refused
    assert "HTTP 403" in error_of(push(hub, run_dir, *license_id))
    assert hub.repositories[REPOSITORY].files == files


def test_adapters_are_pushed_with_the_name_of_what_they_adapt(
    hub: LocalHub, tmp_path: Path
) -> None:
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16)
    hub.repositories["team/llama"] = Repository({f.name: f.read_bytes() for f in llama.iterdir()})
    train = "import sys, test_push; test_push.evaluated(test_push.Path(sys.argv[1]), *sys.argv[2:])"
    lora = ("model.initial_weights=team/llama", "model.segment_length=16", "training.lora={r: 4}")
    command = [sys.executable, "-c", train, str(tmp_path), "bytes", "residual", *lora]
    env = of_hub(hub, tmp_path / "ours") | {"PYTHONPATH": os.pathsep.join(sys.path)}
    trained = run(command, env)
    assert trained.returncode == 0, trained.stderr
    (run_dir,) = (tmp_path / "output" / "runs").glob("[!.l]*")
    card = pushed(hub, run_dir)
    assert "adapter_config.json" in hub.repositories[REPOSITORY].files
    said = card.data.to_dict()
    assert (said["base_model"], said["base_model_relation"]) == ("team/llama", "adapter")
    assert said["library_name"] == "peft"
    assert use_as_told(card, hub, tmp_path / "theirs")


def test_adapters_of_weights_on_this_machine_are_pushed_merged(
    hub: LocalHub, tmp_path: Path
) -> None:
    llama = write_llama(tmp_path / "llama", dtype=torch.bfloat16)
    lora = (f"model.initial_weights={llama}", "model.segment_length=16", "training.lora={r: 4}")
    run_dir = evaluated(tmp_path, "bytes", "residual", *lora)
    refused = error_of(push(hub, run_dir, "--license", "apache-2.0"))
    assert refused.endswith("the run has adapters of weights on this machine; add --merge")
    card = pushed(hub, run_dir, "--merge")
    assert card.data.to_dict()["library_name"] == "infini-model"
    assert use_as_told(card, hub, tmp_path / "theirs")
    shutil.rmtree(llama)  # those of a stranger, who has merged weights alone
    assert use_as_told(card, hub, tmp_path / "another")
