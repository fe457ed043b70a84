"""Steps that are not finite are reported with their documents, and losses that spike are told."""

import ast
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from stopping import StopAfter
from trainings import on_two_ranks

from infini_model.config import validate
from infini_model.data.build import build_dataset
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.data.sources.listing import list_sources
from infini_model.objectives.causal import CausalLM
from infini_model.runtime.errors import NonFiniteError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import newest_checkpoint
from infini_model.runtime.storage import sha256
from infini_model.training.checkpoint import read_state
from infini_model.training.metrics import SpikeWarning
from infini_model.training.nan_report import REMEDIES, TENSORS_SHOWN
from infini_model.training.optimizer import set_learning_rate
from infini_model.training.train import train

# A byte that only one document contains.
POISON = "@"
TRAIN = Path(__file__).parents[3] / "docs" / "train.md"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """60 documents, one of which contains the byte, four times and far apart."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(11)
    for number in range(60):
        words = [f"word{chance.randrange(100)}" for _ in range(chance.randrange(20, 120))]
        if number == 33:
            words = [*words, POISON] * 4
        (folder / f"{number}.txt").write_text(f"{number}. " + " ".join(words) + " Größe")
    data = {
        "source": {"paths": [str(folder / "*.txt")]},
        "splits": {"train": 1, "validation": 0, "test": 0},
        "workers": 1,
    }
    config = validate({"data": data})
    output = tmp_path_factory.mktemp("output")
    manifest = build_dataset(list_sources(config.data, output), config.data, output / "datasets")
    return output / "datasets" / manifest.folder_name


def debugging(make_config, strategy="ddp", **training):
    return make_config(
        packing={"context_length": 64, "mode": "aligned"},
        training={"max_steps": 60} | training,
        logging={"debug": True},
        launch={"strategy": strategy},
    )


def change(checkpoint, name, harm):
    """Change a weight of a checkpoint, as if training had produced that."""
    path = checkpoint / "model" / "model.safetensors"
    tensors = load_file(path)
    harm(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    manifest = checkpoint / "manifest.json"
    tree = json.loads(manifest.read_text())
    tree["sha256"]["model/model.safetensors"] = sha256(path)
    manifest.write_text(json.dumps(tree))


def poison(checkpoint):
    """Make the embedding of the byte infinite."""
    change(checkpoint, "model.embed_tokens.weight", lambda rows: rows[ord(POISON)].fill_(torch.inf))


def rows_in(report):
    """The documents of a report: the shard, and the row in it."""
    found = re.findall(r"• (train/\S+): rows (.+)", report)
    return [(shard, int(row)) for shard, rows in found for row in rows.split(", ")]


def text_of(dataset, shard, row):
    """The text of a document, read from its shard independently."""
    with pa.memory_map(str(dataset / shard)) as source:
        tokens = pa.ipc.open_stream(source).read_next_batch().column(0)[row].values.to_numpy()
    return tokens[:-1].tobytes().decode()


def fail(config, dataset, run_dir):
    """Train until a step is not finite; returns its number and the folder of the report."""
    with pytest.raises(NonFiniteError) as caught:
        train(config, dataset, run_dir)
    step = int(str(caught.value).split(":")[0].removeprefix("step "))
    return step, run_dir / "debug" / f"step-{step}"


def test_a_step_that_is_not_finite_is_reported_with_its_gradients_and_documents(
    poisoned, make_config, tmp_path, caplog
):
    sizes = {"batch_size": 4, "gradient_accumulation_steps": 2}
    config = debugging(make_config, **sizes)
    train(config, poisoned, tmp_path, [StopAfter(1)])
    poison(newest_checkpoint(tmp_path))
    step, folder = fail(config, poisoned, tmp_path)
    every = open_windows(poisoned, "train", config.packing, config.model.segment_length)
    seen_before = {"seed": config.run.seed, "windows_read": (step - 1) * 8}
    with Loader(every, batch_size=4, gradient_accumulation_steps=2, **seen_before) as loader:
        batches = [CausalLM().inputs(batch) for batch in next(loader)]
    (report,) = [r.getMessage() for r in caplog.records if "DETECTED [GPU 0]" in r.getMessage()]
    assert f"Step: {step}" in report.splitlines()
    assert "  • model.embed_tokens.weight (shape: [256, 32])" in report.splitlines()
    assert report.endswith(REMEDIES)

    # The documents are those that the model got, and one of them is at fault.
    read = set("".join(text_of(poisoned, *place) for place in rows_in(report)).encode())
    seen = {token for batch in batches for token in batch.input_ids.unique().tolist()}
    assert ord(POISON) in seen
    assert seen - {255} <= read

    # The gradients are those of the step: of what was not read they are not NaN.
    tensors = load_file(folder / "rank-0.safetensors")
    rows = tensors["gradients/model.embed_tokens.weight"]
    assert {row for row in range(256) if not rows[row].isfinite().all()} <= seen
    named = re.findall(r"^Affected layers: (.+)", report, re.MULTILINE)
    assert {name for names in named for name in ast.literal_eval(names)} == {
        name.partition("/")[2] for name in tensors
    }
    assert report.count("    Grad values from [") == TENSORS_SHOWN
    position = read_state(newest_checkpoint(folder))
    assert (position.step, position.windows_read) == (step - 1, (step - 1) * 8)


def test_a_report_that_cannot_be_saved_does_not_hide_what_it_is_of(
    dataset, make_config, tmp_path, caplog
):
    (tmp_path / "debug").write_text("")
    config = debugging(make_config, learning_rate=1e30)
    fail(config, dataset, tmp_path)
    assert "⚠️  Gradients with NaN" in caplog.text
    assert "cannot save the tensors: " in caplog.text
    assert "cannot save the checkpoint: " in caplog.text
    assert "saved: " not in caplog.text


@pytest.mark.story
def test_each_rank_saves_its_own_shards(poisoned, make_config, tmp_path):
    train(debugging(make_config), poisoned, tmp_path, [StopAfter(1)])
    poison(newest_checkpoint(tmp_path))
    on_two_ranks(fail, debugging(make_config, "fsdp", batch_size=4), poisoned, tmp_path)
    (folder,) = (tmp_path / "debug").glob("step-*")
    first, second = (load_file(folder / f"rank-{n}.safetensors") for n in (0, 1))
    # The row of the byte is of the first rank's half.
    name = "parameters/model.embed_tokens.weight"
    assert [n for n in {**first, **second} if n.startswith("parameters/")] == [name]
    assert first[name].shape == (128, 32)
    assert name not in second
    assert newest_checkpoint(folder).name == f"step-{int(folder.name.removeprefix('step-')) - 1}"


def test_a_spike_is_told_once_and_a_new_level_becomes_normal(caplog):
    losses = 1.5 + 4 * np.exp(-np.arange(400) / 20)
    losses += 0.05 * np.random.default_rng(2).uniform(-2, 2, len(losses))
    for place in (100, 101, 250):
        losses[place] += 3.0
    losses[320:] += 2.0
    told = SpikeWarning()
    for number, loss in enumerate(losses):
        windows = {"first_window": 8 * number, "windows_read": 8 * number + 8}
        told.after_step(SimpleNamespace(number=number, loss=loss, **windows), {})
    found = [record.getMessage() for record in caplog.records]
    assert [int(re.search(r"at step (\d+): ", line)[1]) for line in found] == [100, 250, 320]
    assert "read windows 800 to 807 of" in found[0]


def test_a_step_that_is_too_large_is_followed_by_a_warning(
    dataset, make_config, tmp_path, caplog, monkeypatch
):
    def jump(optimizer, step, config):
        rate = set_learning_rate(optimizer, step, config)
        for group in optimizer.param_groups:
            group["lr"] *= 1e8 if step == 20 else 1
        return rate

    monkeypatch.setattr("infini_model.training.train.set_learning_rate", jump)
    train(make_config(training={"max_steps": 22, "learning_rate": 1e-5}), dataset, tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if "Loss spike" in r.getMessage()]
    assert warning.startswith("Loss spike at step 21: ")


def test_the_documented_metrics_are_recorded(dataset, make_config, tmp_path):
    (table,) = re.findall(
        r"^\| name \| meaning.*?\n\n", TRAIN.read_text(), re.MULTILINE | re.DOTALL
    )
    found = re.findall(r"^\| (`.+?`) \|.*\| (.+) \|$", table, re.MULTILINE)
    rows = [(name, when) for names, when in found for name in re.findall(r"`(.+?)`", names)]
    elsewhere = ("on GPUs", "such a step")
    here = {name.replace("N", "1") for name, when in rows if not any(e in when for e in elsewhere)}
    linear = make_config().model.model_dump() | {"memory": "linear"}
    train(make_config(model=linear), dataset, tmp_path / "run")
    train(make_config(training={"precision": "fp16"}), dataset, tmp_path / "fp16")
    lines = [*read_metrics(tmp_path / "run"), *read_metrics(tmp_path / "fp16")]
    found = {name for line in lines for name in line}
    assert len(here) > 10
    assert here <= found
    named = {name.replace("N", "1") for name, _ in rows} | {"step", "time"}
    assert {name for name in found if not name.startswith("memory/")} <= named
