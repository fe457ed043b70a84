"""The training loop in this process: what it records, saves, refuses and skips, and its hooks.

That it is the same when it is resumed or divided: `test_same_training.py`.
"""

import json
import logging
import math
import re
import shutil
import threading

import pytest
import torch
from curves import curve, repeatable, weights
from safetensors.torch import load_file
from stopping import StopAfter
from torch.profiler import ProfilerActivity, profile
from trainings import cut_off

from infini_model.data.loading.coverage import measure_coverage
from infini_model.data.loading.loader import Loader, Phase
from infini_model.data.loading.windows import open_windows
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.objectives.causal import CausalLM
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError, NonFiniteError, UserError
from infini_model.runtime.runs import is_finished, newest_checkpoint, read_run, record_evaluation
from infini_model.runtime.storage import sha256, write_json
from infini_model.training.callbacks import Callback, Callbacks
from infini_model.training.checkpoint import read_state
from infini_model.training.distributed import World, deterministic_algorithms
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.launch.recovery import record_failure
from infini_model.training.run_status import read_status
from infini_model.training.train import Trainer, train


class Witness(Callback):
    """Notes the hooks."""

    def __init__(self):
        self.events, self.pauses = [], 0

    def on_start(self, step):
        self.events.append(("start", step))

    def after_gradients(self):
        self.events.append(("gradients",))

    def on_non_finite(self, step):
        self.events.append(("not finite", step.number))

    def metrics(self, step):
        assert step.seconds > 0
        return {"mine/double": 2.0 * step.number}

    def after_step(self, step, metrics):
        assert metrics["mine/double"] == 2.0 * step.number
        assert metrics["train/loss"] == step.loss
        self.events.append(("step", step.number))

    def expect_long_work(self):
        self.pauses += 1

    def evaluation_metrics(self, evaluation):
        return {f"mine/{evaluation.split}": evaluation.loss}

    def after_evaluation(self, evaluation, metrics):
        split = evaluation.split
        assert metrics[f"mine/{split}"] == metrics[f"{split}/loss"] == evaluation.loss > 0
        self.events.append((split, evaluation.step))

    def after_checkpoint(self, step, seconds):
        self.events.append(("checkpoint", step))

    def on_end(self, status):
        self.events.append(("end", status))


def test_a_training_learns_records_every_step_once_and_tells_its_callbacks(
    dataset, make_config, tmp_path, monkeypatch
):
    witness, add_up = Witness(), World.sum

    def spy(world, values):
        witness.events.append(("sum",))
        return add_up(world, values)

    monkeypatch.setattr(World, "sum", spy)
    assert train(make_config(), dataset, tmp_path, [witness]).stopped_by is None
    expected = [("start", 0), ("validation", 0)]
    for step in range(1, 13):
        expected += [("gradients",), ("step", step)]
        expected += [("checkpoint", step)] if step % 4 == 0 else []
        expected += [("validation", step)] if step in (5, 10, 12) else []
    expected += [("test", 12), ("end", "FINISHED")]
    assert [event for event in witness.events if event != ("sum",)] == expected
    assert witness.pauses > 0
    # Gradients are announced before a rank waits for the loss of the others: so heartbeats tell
    # which rank of a hang is behind. The first sum is of the targets, by which they are scaled.
    first = witness.events.index(("gradients",)) - 1
    story = [("sum",), ("gradients",), ("sum",), ("step", 1)]
    assert witness.events[first : first + 4] == story

    assert curve(tmp_path, "mine/double") == {step: 2.0 * step for step in range(1, 13)}
    losses = curve(tmp_path, "validation/loss")
    assert list(losses) == [0, 5, 10, 12]
    assert losses[12] < losses[0] - 0.5
    # The steps after a checkpoint record its stall.
    assert list(curve(tmp_path, "checkpoint/stall_seconds")) == [5, 9]
    saved = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert saved == {"step-12", "step-8"}
    position = read_state(newest_checkpoint(tmp_path))
    assert (position.windows_read, position.precision) == (12 * 8, "fp32")


def test_a_step_that_is_not_finite_ends_the_training_before_the_weights_change(
    dataset, make_config, tmp_path
):
    witness = Witness()
    config = make_config(training={"learning_rate": 1e30}, checkpoint={"save_steps": 1})
    with pytest.raises(NonFiniteError, match="the step was not taken"):
        train(config, dataset, tmp_path, [witness])
    step = witness.events.count(("gradients",))
    assert witness.events[-3:] == [("gradients",), ("not finite", step), ("end", "FAILED")]
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint.name == f"step-{step - 1}"
    parameters = load_file(checkpoint / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in parameters.values())


def test_a_step_that_is_read_late_as_on_a_gpu_is_recorded_saved_and_reported_the_same(
    dataset, make_config, tmp_path, monkeypatch
):
    config = make_config(training={"precision": "fp16"})
    failing = make_config(training={"learning_rate": 1e30}, logging={"debug": True})
    found = {}
    for late in (False, True):
        monkeypatch.setattr(Trainer, "reads_late", property(lambda _, late=late: late))
        run_dir, parts, failed = (
            tmp_path / f"{name}-{late}" for name in ("run", "parts", "failed")
        )
        train(config, dataset, run_dir)
        stopped = train(config, dataset, parts, [StopAfter(6)]).step
        # The signal is shared with the step after it, which the host reads when it has launched
        # another one.
        assert stopped == (8 if late else 7)
        assert newest_checkpoint(parts).name == f"step-{stopped}"
        train(config, dataset, parts)
        assert repeatable(parts) == repeatable(run_dir)
        assert weights(parts) == weights(run_dir)

        with pytest.raises(NonFiniteError, match="the step was not taken") as caught:
            train(failing, dataset, failed)
        (folder,) = (failed / "debug").iterdir()
        report = (folder / "rank-0.safetensors").read_bytes()
        saved = (newest_checkpoint(folder).name, weights(folder))
        found[late] = repeatable(run_dir), weights(run_dir), str(caught.value), report, saved
    assert found[True] == found[False]


def test_a_callback_that_fails_keeps_no_other_from_ending(dataset, make_config, tmp_path, caplog):
    class Failing(Callback):
        def after_evaluation(self, evaluation, metrics):
            raise OSError("no evaluation")

        def on_end(self, status):
            raise OSError("no end")

    witness = Witness()
    with pytest.raises(OSError, match="no evaluation"):
        train(make_config(), dataset, tmp_path / "run", [Failing(), witness])
    assert witness.events[-1] == ("end", "FAILED")
    # It is the first error that is reported.
    assert "Failing failed at the end of the training: OSError('no end')" in caplog.text
    assert "Traceback" not in caplog.text
    Callbacks([Failing()]).end("FINISHED")
    assert "Traceback" in caplog.text
    threads = {thread.name for thread in threading.enumerate()}
    assert not {name for name in threads if name.startswith(("loader", "checkpoint"))}


def test_a_finished_training_makes_again_only_what_is_missing_or_damaged(
    dataset, make_config, tmp_path, caplog
):
    run_dir = tmp_path / "run"
    train(make_config(), dataset, run_dir)
    before = (repeatable(run_dir), weights(run_dir))
    trained = InfiniLlama.from_pretrained(newest_checkpoint(run_dir) / "model").state_dict()

    def expect_same_after(damage):
        damage()
        train(make_config(), dataset, run_dir)
        assert (repeatable(run_dir), weights(run_dir)) == before
        exported = InfiniLlama.from_pretrained(run_dir / "model").state_dict()
        assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())

    expect_same_after(lambda: None)
    # As after a kill between the last checkpoint and the export.
    expect_same_after(lambda: shutil.rmtree(run_dir / "model"))
    file = newest_checkpoint(run_dir) / "optimizer.safetensors"
    with caplog.at_level(logging.WARNING):
        expect_same_after(lambda: file.write_bytes(file.read_bytes()[:-1]))
    assert str(file) in caplog.text


def test_epochs_are_converted_to_steps(dataset, make_config, tmp_path):
    """Also when interrupted and resumed, bit for bit as with the number of steps."""
    asked = make_config(training={"max_steps": None, "epochs": 0.3})
    windows = open_windows(dataset, "train", asked.packing, asked.model.segment_length)
    steps = math.ceil(0.3 * len(windows) / asked.training.batch_size)
    train(make_config(training={"max_steps": steps}), dataset, tmp_path / "explicit")
    with claim_run(asked, "key", dataset) as run_dir:
        assert (read_run(run_dir).max_steps, is_finished(run_dir)) == (None, False)
        assert train(asked, dataset, run_dir, [StopAfter(2)]).step < steps
        train(asked, dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "explicit")
    assert weights(run_dir) == weights(tmp_path / "explicit")
    assert read_run(run_dir).max_steps == read_status(run_dir).total == steps
    record_evaluation(run_dir, steps, "key", {})
    assert is_finished(run_dir)


def test_a_warm_up_that_the_training_does_not_reach_is_warned_of(
    dataset, make_config, tmp_path, caplog
):
    for warmup in (2, 4):
        settings = {"max_steps": 2, "warmup_steps": warmup}
        train(make_config(training=settings), dataset, tmp_path / str(warmup))
    (warning,) = [each for each in caplog.messages if each.startswith("training.warmup_steps")]
    assert warning.startswith("training.warmup_steps: 4 is more than the 2 steps")
    assert warning.endswith("at 50% of it")


def test_padding_is_logged_and_counts_as_no_token(dataset, make_config, tmp_path, caplog):
    packing = {"mode": "aligned", "remainder": "pad"}
    config = make_config(packing=packing, training={"max_steps": 3})
    with caplog.at_level(logging.INFO):
        train(config, dataset, tmp_path)
    windows = open_windows(dataset, "train", config.packing, config.model.segment_length)
    rates, seconds = (curve(tmp_path, f"train/{n}") for n in ("tokens_per_second", "step_seconds"))
    with Loader(windows, batch_size=config.training.batch_size, seed=config.run.seed) as loader:
        for step in rates:
            (batch,) = next(loader)
            labels = CausalLM().inputs(batch).labels
            targets = int((labels != IGNORED).sum())
            assert rates[step] * seconds[step] == pytest.approx(targets)
            assert targets < labels.numel()
    coverage = measure_coverage(Phase(windows), config.model.segment_length)
    assert set(coverage.describe(config.model.memory)) <= set(caplog.messages)


def with_scale(run_dir, step, scale):
    """Change the loss scale that the checkpoint of `step` holds."""
    checkpoint = run_dir / "checkpoints" / f"step-{step}"
    state = json.loads((checkpoint / "state.json").read_text())
    state["scaler"]["scale"] = scale
    write_json(checkpoint / "state.json", state)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = sha256(checkpoint / "state.json")
    write_json(checkpoint / "manifest.json", manifest)


def tensors(run_dir, step):
    """The weights and moments of a checkpoint, as bytes."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return [(folder / n).read_bytes() for n in ("model/model.safetensors", "optimizer.safetensors")]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fp16_skips_overflows_halves_its_scale_and_resumes_to_the_same_bits(
    dataset, make_config, tmp_path, optimizer
):
    config = make_config(
        training={"precision": "fp16", "optimizer": optimizer},
        checkpoint={"save_steps": 1, "save_total_limit": 12},
    )
    train(config, dataset, tmp_path / "fp16")
    large = cut_off(tmp_path / "fp16", 4, tmp_path / "large")
    with_scale(large, 4, 2.0**22)
    train(config, dataset, large)
    skipped = list(curve(large, "train/skipped_steps"))
    assert skipped == list(range(5, 5 + len(skipped)))
    assert 1 < len(skipped) < 8
    scales = curve(large, "train/loss_scale")
    assert [scales[step] for step in skipped] == [2.0 ** (26 - step) for step in skipped]
    assert scales[12] == scales[skipped[-1]]
    kept = [tensors(large, step) for step in (4, *skipped)]
    assert all(each == kept[0] for each in kept)
    assert tensors(large, 12) != kept[0]
    assert not set(skipped) & set(curve(large, "train/grad_norm"))

    again = cut_off(large, skipped[1], tmp_path / "again")
    train(config, dataset, again)
    assert repeatable(again) == repeatable(large)
    assert weights(again) == weights(large)


def test_settings_that_do_not_fit_the_dataset_or_the_run_are_refused(
    dataset, make_config, tmp_path
):
    run_dir = tmp_path / "run"
    train(make_config(training={"max_steps": 1}), dataset, run_dir)
    small, many = {"vocab_size": 100}, {"batch_size": 100_000}
    longer, larger = {"max_steps": 2}, {"max_steps": 1, "batch_size": 3}
    for config, data, folder, error in (
        (make_config(model=small), dataset, "new", r"model\.vocab_size: 100 is less than .* \d+$"),
        (make_config(model={"hidden_size": 64}), dataset, "run", r"hidden_size is 32, not 64"),
        (make_config(run={"seed": 7}), dataset, "run", r"other settings: run\.seed is 3, not 7"),
        (make_config(training=longer), dataset, "run", r"training\.max_steps is 1, not 2"),
        (make_config(training=larger), dataset, "run", r"batch_size is \d, not 3; choose"),
        (make_config(training=many, launch={"force": True}), dataset, "new", "too few tokens for"),
    ):
        with pytest.raises(UserError, match=error):
            train(config, data, tmp_path / folder)


# What the documentation of torch names by its module or another function.
RAISES = {"nll_loss2d_forward", "grid_sampler_2d_backward"}
# Made deterministic on CUDA by a copy from the host.
COPIES = {"scatter", "scatter_"}


def undesired():
    """Operators that raise on CUDA, as torch documents them, or wait for the host there."""
    documented = torch.use_deterministic_algorithms.__doc__
    raising = documented[documented.index("operations will throw a") :]
    names = set(re.findall(r":func:`torch\.(?:\w+\.)*(\w+)`", raising))
    assert {"put_", "histc"} <= names
    # `resize_` raises for a quantised tensor only.
    return {f"aten::{name}" for name in (names | RAISES | COPIES) - {"resize_"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "training": {"objective": "block_diffusion"},
            "model": {"memory": "delta"},
            "packing": {"mode": "aligned"},
        },
        {"model": {"memory": "residual"}, "training": {"optimizer": "muon"}},
    ],
    ids=["causal", "block diffusion", "residual, muon"],
)
def test_no_operator_of_a_training_is_without_a_deterministic_form(
    sections, dataset, make_config, tmp_path
):
    """No GPU is needed: a profile of steps on a CPU has the operators that would run there."""
    training = sections.get("training", {}) | {"max_steps": 1, "batch_size": 2}
    config = make_config(**sections | {"training": training, "evaluation": {"max_windows": 2}})
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(config, dataset, tmp_path / "run")
    called = {event.key for event in profiled.key_averages()}
    assert {"aten::_fused_adamw_", "_LossAndGradients"} <= called
    assert called & undesired() == set()


def test_an_operation_without_a_deterministic_form_is_an_error_that_names_the_setting():
    ones = torch.ones(3)
    with (
        pytest.raises(ConfigError, match=r"launch\.deterministic: put_ is not deterministic"),
        deterministic_algorithms(),
    ):
        ones.put_(torch.tensor([0]), torch.tensor([2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="another"), deterministic_algorithms():
        raise RuntimeError("another")


def test_all_layers_are_recomputed_once_memory_has_run_out(dataset, make_config, tmp_path, caplog):
    config, run_dir = make_config(training={"max_steps": 1, "batch_size": 4}), tmp_path / "run"
    run_dir.mkdir()
    record_failure(run_dir, TrainingFailure("out of memory", "full", 0), config)
    with caplog.at_level(logging.INFO):
        train(config, dataset, run_dir)
        train(config, dataset, tmp_path / "other")
    said = [line for line in caplog.messages if line.startswith("Recomputed layers: ")]
    layers = config.model.num_hidden_layers
    assert said == [f"Recomputed layers: {count} of {layers}" for count in (layers, 0)]
