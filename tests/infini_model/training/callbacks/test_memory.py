"""What a training records of its memory, what it warns of, and that it changes nothing."""

import logging
import math

import pytest
import torch
from curves import curve, repeatable, weights
from stopping import StopAfter
from trainings import on_two_ranks

from infini_model.data.loading.validation import sample_windows
from infini_model.data.loading.windows import open_windows
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks import defaults, memory
from infini_model.training.callbacks.callback import Callback
from infini_model.training.checkpoints.checkpoint import newest_checkpoint
from infini_model.training.loop import train
from infini_model.training.validation import PROBE_WINDOWS, loss_by_segment

BY_LAYER = ["share", "kv_norm", "normaliser_norm"]
AT_VALIDATION = {f"memory/layer_{layer}/{name}" for layer in range(2) for name in BY_LAYER}
AT_VALIDATION |= {"memory/probe_loss", "memory/probe_loss_without_memory"}
AT_VALIDATION |= {"memory/probe_gain", "memory/probe_gain_error"}
OF_GATES = ["gate_mean", "gate_min", "gate_max", "gate_grad_norm"]
AT_LOG_LINES = {f"memory/layer_{layer}/{name}" for layer in range(2) for name in OF_GATES}
BLOCKS = {"training": {"objective": "block_diffusion"}}
ALIGNED = {"packing": {"mode": "aligned", "context_length": 64}}


def of_memory(line):
    return {name for name in line if name.startswith("memory/")}


@pytest.mark.parametrize("sections", [{}, BLOCKS, ALIGNED], ids=["causal", "blocks", "aligned"])
def test_every_validation_and_log_line_has_the_metrics_of_the_memory(
    dataset, make_config, tmp_path, sections
):
    train(make_config(**sections), dataset, tmp_path)
    validations = [line for line in read_metrics(tmp_path) if "validation/loss" in line]
    steps = [line for line in read_metrics(tmp_path) if "train/loss" in line]
    assert [line["step"] for line in validations] == [0, 5, 10, 12]
    assert all(of_memory(line) == AT_VALIDATION for line in validations)
    assert [line["step"] for line in steps if of_memory(line) == AT_LOG_LINES] == [
        2,
        4,
        6,
        8,
        10,
        12,
    ]
    assert all(0 < line["memory/layer_1/share"] < 1 for line in validations)
    assert all(line["memory/layer_1/gate_grad_norm"] > 0 for line in steps if line["step"] % 2 == 0)
    # It holds nothing that says how large it is, but that it is not empty.
    assert all(line["memory/layer_0/kv_norm"] > 0 for line in validations)
    assert "memory/probe_loss" not in next(x for x in read_metrics(tmp_path) if "test/loss" in x)


def test_the_loss_by_segment_averages_to_the_loss(dataset, make_config, tmp_path):
    train(make_config(), dataset, tmp_path)
    for split in ("validation", "test"):
        for step, loss in curve(tmp_path, f"{split}/loss").items():
            parts = [
                curve(tmp_path, f"{split}/loss_by_segment/{name}")[step]
                for name in ("1", "2", "3-4")
            ]
            assert len(set(parts)) == 3
            assert (parts[0] + parts[1] + 2 * parts[2]) / 4 == pytest.approx(loss)


def test_segments_are_gathered_in_bins_that_double():
    ones = torch.ones(11)
    assert list(loss_by_segment(ones, ones)) == ["1", "2", "3-4", "5-8", "9-11"]
    sums, targets = torch.tensor([2.0, 3.0, 4.0, 9.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 3.0, 0.0])
    assert loss_by_segment(sums, targets) == {"1": 2.0, "2": 3.0, "3-4": 13 / 4}
    assert loss_by_segment(ones[:1], ones[:1]) == {}


def test_the_probe_compares_some_windows_of_the_sample_with_themselves(
    dataset, make_config, tmp_path
):
    config = make_config()
    train(config, dataset, tmp_path)
    model = InfiniLlama.from_pretrained(newest_checkpoint(tmp_path) / "model")
    windows = open_windows(dataset, "validation", config.packing, 16)
    numbers = sample_windows(len(windows), PROBE_WINDOWS)
    assert len(windows) > len(numbers) == PROBE_WINDOWS
    (tokens,) = windows.gather(numbers).tokens.unbind(1)
    losses = []
    for reset in (None, torch.ones(len(tokens), 4, dtype=torch.bool)):
        with torch.no_grad():
            logits = model(tokens[:, :-1], reset=reset).logits
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


@pytest.mark.parametrize("sections", [{}, BLOCKS], ids=["causal", "blocks"])
def test_recording_changes_no_bit_of_the_training(
    dataset, make_config, tmp_path, monkeypatch, sections
):
    train(make_config(**sections), dataset, tmp_path / "recorded")
    monkeypatch.setattr(defaults, "MemoryReports", lambda parts: Callback())
    train(make_config(**sections), dataset, tmp_path / "alone")
    assert not any(of_memory(line) for line in read_metrics(tmp_path / "alone"))
    assert weights(tmp_path / "recorded") == weights(tmp_path / "alone")


def test_without_a_memory_nothing_is_recorded_of_it(dataset, make_config, tmp_path):
    shape = make_config().model.model_dump() | {"memory": "none"}
    train(make_config(model=shape), dataset, tmp_path)
    assert not any(of_memory(line) for line in read_metrics(tmp_path))
    assert len(curve(tmp_path, "validation/loss_by_segment/3-4")) == 4


@pytest.fixture
def soon(monkeypatch):
    """Warnings are due after 12 steps."""
    monkeypatch.setattr(memory, "SETTLED_STEPS", 10)


def trained(make_config, dataset, run_dir, caplog, *callbacks, at=12, packing=None, **fields):
    """The warnings of a training that validates after `at` steps."""
    training = {"gate_learning_rate": fields.pop("gate_learning_rate", 1e-2)}
    config = make_config(
        model=make_config().model.model_dump() | fields,
        packing=packing or {},
        training=training | {"max_steps": at + 4, "batch_size": 2},
        logging={"logging_steps": 2, "eval_steps": at},
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(config, dataset, run_dir, callbacks)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.usefixtures("soon")
def test_gates_that_do_not_move_are_warned_of_once_per_run(dataset, make_config, tmp_path, caplog):
    stuck = {"gate_learning_rate": 1e-9, "gate_start": -1.0}
    run = (make_config, dataset, tmp_path / "run", caplog)
    (warning,) = trained(*run, StopAfter(14), **stuck)
    assert warning == (
        "At step 12: All gates are still at model.gate_start=-1 after 12 steps. "
        "Raise training.gate_learning_rate."
    )
    assert trained(*run, **stuck) == []  # resumed: it was said
    assert len(curve(tmp_path / "run", "memory/probe_gain")) == 3
    one_segment = {"context_length": 16}
    run = (make_config, dataset, tmp_path / "short", caplog)
    (warning,) = trained(*run, packing=one_segment)
    assert "make packing.context_length several times model.segment_length" in warning
    assert trained(make_config, dataset, tmp_path / "fine", caplog) == []


def test_a_young_training_is_not_warned_of(dataset, make_config, tmp_path, caplog):
    assert trained(make_config, dataset, tmp_path, caplog, gate_learning_rate=1e-9) == []


@pytest.mark.usefixtures("soon")
def test_layers_that_never_read_are_warned_of(dataset, make_config, tmp_path, caplog):
    (warning,) = trained(make_config, dataset, tmp_path, caplog, gate_start=-12.0)
    assert warning.startswith(
        "At step 12: Layers 0 and 1 of 2 (counted from 0) never read the memory: less than 1%"
    )
    assert "model.gate_start" in warning


class OpenGates(Callback):
    """Opens the gates of a model that was trained without reading, as noise to its later layers."""

    def __init__(self):
        self.model = None

    def after_step(self, step, metrics):
        if step.number == 103:
            with torch.no_grad():
                for layer in self.model.model.layers:
                    layer.self_attn.gate.fill_(3.0)


def test_a_memory_that_hurts_is_warned_of(dataset, make_config, tmp_path, caplog, monkeypatch):
    opening = OpenGates()
    make = defaults.MemoryReports

    def with_model(parts):
        opening.model = parts.model
        return make(parts)

    monkeypatch.setattr(defaults, "MemoryReports", with_model)
    (warning,) = trained(make_config, dataset, tmp_path, caplog, opening, at=104, gate_start=-12.0)
    assert warning.startswith("At step 104: The memory hurts: with the same weights the loss is 0.")
    assert "model.memory=delta" in warning
    assert curve(tmp_path, "memory/probe_gain")[104] < 0


@pytest.mark.story
def test_ranks_record_what_one_process_does(dataset, make_config, tmp_path):
    """With DDP and FSDP, also where a rank has no window of the probe left."""
    for name, sections in {"": {}, "blocks ": BLOCKS, "aligned ": ALIGNED}.items():

        def config(strategy, batch_size, sections=sections):
            return make_config(
                **sections
                | {
                    "training": {
                        **sections.get("training", {}),
                        "max_steps": 4,
                        "batch_size": batch_size,
                    }
                },
                launch={"strategy": strategy},
                evaluation={"max_windows": 7},
            )

        train(config("ddp", 6), dataset, tmp_path / f"{name}one")
        for strategy in ("ddp", "fsdp"):
            run_dir = tmp_path / f"{name}{strategy}"
            on_two_ranks(train, config(strategy, 3), dataset, run_dir)
            ours, theirs = repeatable(run_dir), repeatable(tmp_path / f"{name}one")
            assert [line.keys() for line in ours] == [line.keys() for line in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                for metric in of_memory(mine):
                    assert mine[metric] == pytest.approx(other[metric], rel=1e-3, abs=5e-5), metric
