"""What a training records of its memory, what it warns of, and that it changes nothing.

That two ranks record the same: `test_same_training.py`.
"""

import logging
import math

import numpy as np
import pytest
import torch
from curves import curve, weights
from stopping import StopAfter

from infini_model.data.loading.windows import open_windows, sample_windows
from infini_model.evaluation.report import evaluate_run
from infini_model.model.llama import InfiniLlama
from infini_model.objectives.causal import CausalLM
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training import train as loop
from infini_model.training import validation
from infini_model.training.callbacks import Callback
from infini_model.training.train import train
from infini_model.training.validation import PROBE_WINDOWS

AT_VALIDATION = {
    *(f"memory/probe_{name}" for name in ("loss", "loss_without_memory", "gain", "gain_error")),
    *(f"memory/layer_{n}/read_weight_{name}" for n in range(2) for name in ("mean", "min", "max")),
}
BLOCKS = {"objective": "block_diffusion"}


def of_memory(line):
    return {name for name in line if name.startswith("memory/")}


def test_the_metrics_of_the_memory_are_recorded_and_change_no_bit(
    dataset, make_config, tmp_path, monkeypatch
):
    config = make_config(training=BLOCKS | {"max_steps": 12}, packing={"mode": "aligned"})
    recorded, alone = tmp_path / "recorded", tmp_path / "alone"
    train(config, dataset, recorded)
    validations = [line for line in read_metrics(recorded) if "validation/loss" in line]
    steps = [line for line in read_metrics(recorded) if "train/loss" in line]
    assert [line["step"] for line in validations] == [0, 5, 10, 12]
    assert all(of_memory(line) == AT_VALIDATION for line in validations)
    assert not any(of_memory(line) for line in steps)
    # Its weights are 0 at first.
    gains = [line["memory/probe_gain"] for line in validations]
    assert gains[0] == 0 != gains[-1]
    assert [line["memory/layer_1/read_weight_max"] > 0 for line in validations] == [
        False,
        *[True] * 3,
    ]

    monkeypatch.setattr(loop, "MemoryReports", lambda setup: Callback())
    train(config, dataset, alone)
    assert not any(of_memory(line) for line in read_metrics(alone))
    assert weights(recorded) == weights(alone)


def test_the_probe_is_what_it_says(dataset, make_config, tmp_path):
    config = make_config()
    train(config, dataset, tmp_path)
    # The probe compares some windows of the sample with themselves.
    model = InfiniLlama.from_pretrained(newest_checkpoint(tmp_path) / "model")
    windows = open_windows(dataset, "validation", config.packing, 16)
    numbers = sample_windows(len(windows), PROBE_WINDOWS)
    assert len(windows) > len(numbers) == PROBE_WINDOWS
    (tokens,) = windows.gather(numbers).tokens.unbind(1)
    losses = []
    for document_starts in (None, torch.ones(len(tokens), 4, dtype=torch.bool)):
        with torch.no_grad():
            logits = model(tokens[:, :-1], document_starts=document_starts).logits
        each = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        losses.append(each.mean(1))
    gains = losses[1] - losses[0]
    expected = {
        "memory/probe_loss": losses[0].mean(),
        "memory/probe_loss_without_memory": losses[1].mean(),
        "memory/probe_gain": gains.mean(),
        "memory/probe_gain_error": gains.std() / math.sqrt(len(gains)),
    }
    for name, value in expected.items():
        assert curve(tmp_path, name)[12] == pytest.approx(float(value), rel=1e-3, abs=1e-5)


LINEAR = {"memory": "linear"}


@pytest.fixture
def warned(dataset, make_config, tmp_path, caplog, monkeypatch):
    """The warnings of a training that validates after 12 steps."""

    def run(
        *callbacks, name="run", settled=10, context_length=64, memory_learning_rate=1e-2, **model
    ):
        monkeypatch.setattr(validation, "SETTLED_STEPS", settled)
        config = make_config(
            model=make_config().model.model_dump() | model,
            packing={"context_length": context_length},
            training={
                "memory_learning_rate": memory_learning_rate,
                "max_steps": 16,
                "batch_size": 2,
            },
            logging={"logging_steps": 2, "eval_steps": 12},
            evaluation={"max_windows": 16},
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            train(config, dataset, tmp_path / name, callbacks)
        return [record.getMessage() for record in caplog.records]

    return run


def test_a_memory_that_nothing_reads_is_warned_of(warned):
    assert warned() == []
    (warning,) = warned(name="short", context_length=16)
    assert "only 0% of the segments read a memory" in warning


def test_a_memory_that_hurts_is_warned_of_once(warned, monkeypatch):
    found = {"memory/probe_gain": -0.05, "memory/probe_gain_error": 0.02}
    monkeypatch.setattr(validation, "probe_memory", lambda *_, **__: found)
    assert warned(settled=100) == []
    (warning,) = warned(StopAfter(14), name="settled")
    assert "At step 12: The memory hurts: with the same weights the loss is 0.0500 low" in warning
    assert len(warned(name="settled")) == 1  # resumed


def test_read_weights_are_recorded_from_their_start_on(warned, tmp_path):
    assert warned(**LINEAR, memory_learning_rate=1e-9, read_weight_start=-1.0) == []
    recorded = [of_memory(line) for line in read_metrics(tmp_path / "run") if of_memory(line)]
    assert recorded == [AT_VALIDATION] * 3
    mean = curve(tmp_path / "run", "memory/layer_1/read_weight_mean")[12]
    assert mean == pytest.approx(1 / (1 + math.e), abs=0.01)


WEIGHED = {"weights": {"texts": 3, "chats": 1}, "max_epochs": {"chats": 2}}


def test_each_source_has_its_loss_and_its_epochs(mixture, make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = make_config(packing={"context_length": 64} | WEIGHED)
    train(config, mixture, tmp_path)
    model = InfiniLlama.from_pretrained(newest_checkpoint(tmp_path) / "model")
    total = targets = 0.0
    validation = open_windows(mixture, "validation", config.packing, config.model.segment_length)
    for name, numbers in validation.sources.items():
        inputs = CausalLM().inputs(validation.gather(np.array(numbers)))
        with torch.no_grad():
            loss = float(model(inputs.input_ids, labels=inputs.labels).loss)
        assert curve(tmp_path, f"validation/{name}/loss")[12] == pytest.approx(loss, rel=1e-4)
        count = int(inputs.counted.sum())
        total, targets = total + count * loss, targets + count
    assert curve(tmp_path, "validation/loss")[12] == pytest.approx(total / targets, rel=1e-4)
    sources = open_windows(mixture, "train", config.packing, config.model.segment_length).sources
    for name, read in (("texts", 72), ("chats", 24)):
        epochs = curve(tmp_path, f"train/{name}/epochs")
        assert list(epochs) == [2, 4, 6, 8, 10, 12]
        assert epochs[12] == read / len(sources[name])
    assert "Epochs of chats: " in caplog.text
    scores = evaluate_run(tmp_path, mixture, config).metrics
    report = (tmp_path / "report.md").read_text()
    for name in sources:
        loss = curve(tmp_path, f"validation/{name}/loss")[12]
        assert scores[f"evaluation/{name}/validation_loss"] == pytest.approx(loss, rel=1e-4)
        assert f"| validation: {name} | {loss:.4f} |" in report
    assert f"| Epochs by source | chats {24 / len(sources['chats']):.2f}, texts " in report


def test_a_source_that_is_read_too_often_is_named_before_the_first_step(
    mixture, make_config, tmp_path, caplog
):
    config = make_config(packing=WEIGHED, training={"max_steps": 500})
    refused = (
        r"^packing\.max_epochs\.chats: is 2, but the training reads this source \d+\.\d\d times"
    )
    with pytest.raises(ConfigError, match=refused):
        train(config, mixture, tmp_path)
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(ConfigError, match=r"max_epochs\.web: the sources are chats, texts$"):
        train(make_config(packing={"max_epochs": {"web": 1}}), mixture, tmp_path / "other")
    # Unlimited, it is a warning.
    train(make_config(training={"max_steps": 1, "batch_size": 100}), mixture, tmp_path / "once")
    assert "passes teach little" not in caplog.text
    weights = {"texts": 1, "chats": 0}
    often = make_config(training={"max_steps": 6, "batch_size": 100}, packing={"weights": weights})
    train(often, mixture, tmp_path / "often")
    assert "source texts is read " in caplog.text
