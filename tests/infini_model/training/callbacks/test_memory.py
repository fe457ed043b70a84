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
def test_the_metrics_of_the_memory_are_recorded_and_change_no_bit(
    dataset, make_config, tmp_path, monkeypatch, sections
):
    recorded, alone = tmp_path / "recorded", tmp_path / "alone"
    train(make_config(**sections), dataset, recorded)
    validations = [line for line in read_metrics(recorded) if "validation/loss" in line]
    steps = [line for line in read_metrics(recorded) if "train/loss" in line]
    assert [line["step"] for line in validations] == [0, 5, 10, 12]
    assert all(of_memory(line) == AT_VALIDATION for line in validations)
    with_gates = [line["step"] for line in steps if of_memory(line) == AT_LOG_LINES]
    assert with_gates == [2, 4, 6, 8, 10, 12]
    assert all(0 < line["memory/layer_1/share"] < 1 for line in validations)
    assert all(line["memory/layer_1/gate_grad_norm"] > 0 for line in steps if line["step"] % 2 == 0)
    # It holds nothing that says how large it is, but that it is not empty.
    assert all(line["memory/layer_0/kv_norm"] > 0 for line in validations)
    assert "memory/probe_loss" not in next(x for x in read_metrics(recorded) if "test/loss" in x)

    monkeypatch.setattr(defaults, "MemoryReports", lambda parts: Callback())
    train(make_config(**sections), dataset, alone)
    assert not any(of_memory(line) for line in read_metrics(alone))
    assert weights(recorded) == weights(alone)


def test_segments_are_gathered_in_bins_that_double():
    ones = torch.ones(11)
    assert list(loss_by_segment(ones, ones)) == ["1", "2", "3-4", "5-8", "9-11"]
    sums, targets = torch.tensor([2.0, 3.0, 4.0, 9.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 3.0, 0.0])
    assert loss_by_segment(sums, targets) == {"1": 2.0, "2": 3.0, "3-4": 13 / 4}
    assert loss_by_segment(ones[:1], ones[:1]) == {}


def test_the_loss_by_segment_and_the_probe_are_what_they_say(dataset, make_config, tmp_path):
    config = make_config()
    train(config, dataset, tmp_path)
    for split in ("validation", "test"):
        for step, loss in curve(tmp_path, f"{split}/loss").items():
            parts = [
                curve(tmp_path, f"{split}/loss_by_segment/{name}")[step]
                for name in ("1", "2", "3-4")
            ]
            assert len(set(parts)) == 3
            assert (parts[0] + parts[1] + 2 * parts[2]) / 4 == pytest.approx(loss)
    # The probe compares some windows of the sample with themselves.
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


def test_without_a_memory_nothing_is_recorded_of_it(dataset, make_config, tmp_path):
    shape = make_config().model.model_dump() | {"memory": "none"}
    train(make_config(model=shape), dataset, tmp_path)
    assert not any(of_memory(line) for line in read_metrics(tmp_path))
    assert len(curve(tmp_path, "validation/loss_by_segment/3-4")) == 4


def trained(make_config, dataset, run_dir, caplog, *callbacks, packing=None, **fields):
    """The warnings of a training that validates after 12 steps."""
    training = {"gate_learning_rate": fields.pop("gate_learning_rate", 1e-2)}
    config = make_config(
        model=make_config().model.model_dump() | fields,
        packing=packing or {},
        training=training | {"max_steps": 16, "batch_size": 2},
        logging={"logging_steps": 2, "eval_steps": 12},
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        train(config, dataset, run_dir, callbacks)
    return [record.getMessage() for record in caplog.records]


STUCK = {"gate_learning_rate": 1e-9, "gate_start": -1.0}


@pytest.mark.parametrize(
    ("settled", "fields", "warning"),
    [
        (10, {}, None),
        (100, STUCK, None),
        (10, {"packing": {"context_length": 16}}, "make packing.context_length several times mod"),
        (10, {"gate_start": -12.0}, "At step 12: Layers 0 and 1 of 2 (counted from 0) never read"),
    ],
    ids=["fine", "young", "one segment", "never read"],
)
def test_a_memory_that_is_of_no_use_is_warned_of(
    dataset, make_config, tmp_path, caplog, monkeypatch, settled, fields, warning
):
    monkeypatch.setattr(memory, "SETTLED_STEPS", settled)
    warnings = trained(make_config, dataset, tmp_path, caplog, **fields)
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_gates_that_do_not_move_are_warned_of_once_per_run(
    dataset, make_config, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(memory, "SETTLED_STEPS", 10)
    run = (make_config, dataset, tmp_path / "run", caplog)
    (warning,) = trained(*run, StopAfter(14), **STUCK)
    assert warning == (
        "At step 12: All gates are still at model.gate_start=-1 after 12 steps. "
        "Raise training.gate_learning_rate."
    )
    assert trained(*run, **STUCK) == []  # resumed: it was said
    assert len(curve(tmp_path / "run", "memory/probe_gain")) == 3


def test_a_memory_that_hurts_is_warned_of(dataset, make_config, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(memory, "SETTLED_STEPS", 10)
    probe = memory.probe_memory

    def hurting(*arguments, **options):
        return probe(*arguments, **options)._replace(gain=-1.0, error=0.1)

    monkeypatch.setattr(memory, "probe_memory", hurting)
    (warning,) = trained(make_config, dataset, tmp_path, caplog)
    assert warning.startswith("At step 12: The memory hurts: with the same weights the loss is 1.")


@pytest.mark.story
def test_ranks_record_what_one_process_does(dataset, make_config, tmp_path):
    """Of sharded parameters too, and where a rank has no window of the probe left."""

    def config(batch_size):
        return make_config(
            training=BLOCKS["training"] | {"max_steps": 4, "batch_size": batch_size},
            launch={"strategy": "fsdp"},
            evaluation={"max_windows": 7},
        )

    train(config(6), dataset, tmp_path / "one")
    on_two_ranks(train, config(3), dataset, tmp_path / "two")
    ours, theirs = repeatable(tmp_path / "two"), repeatable(tmp_path / "one")
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for metric in of_memory(mine):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-3, abs=5e-5), metric
