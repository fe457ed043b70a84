"""The training loop in this process: what it records, saves, refuses and skips.

That it is the same when it is resumed or divided: `test_same_training.py`.
"""

import json
import logging
import math
import re
import shutil
import signal

import pytest
import torch
from curves import curve, repeatable, weights
from safetensors.torch import load_file
from stopping import StopAfter
from torch.profiler import ProfilerActivity, profile
from trainings import cut_off

from infini_model.data.loading.windows import open_windows
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError, NonFiniteError, UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import is_finished, last_step, record_evaluation
from infini_model.runtime.storage import sha256, write_json
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.loop import train
from infini_model.training.parallel.distributed import deterministic_algorithms
from infini_model.training.run_status import read_status


def test_a_training_learns_and_records_every_step_once(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    assert train(make_config(), dataset, run_dir).stopped_by is None
    assert list(curve(run_dir, "train/loss")) == list(range(1, 13))
    assert list(curve(run_dir, "validation/loss")) == [0, 5, 10, 12]
    assert list(curve(run_dir, "test/loss")) == [12]
    losses = curve(run_dir, "validation/loss")
    assert losses[12] < losses[0] - 0.5
    line = next(line for line in read_metrics(run_dir) if line["step"] == 2)
    for name in (
        "learning_rate",
        "grad_norm",
        "step_seconds",
        "tokens_per_second",
        "data_wait_seconds",
    ):
        assert line[f"train/{name}"] > 0
    # The steps after a checkpoint record its stall.
    assert list(curve(run_dir, "checkpoint/stall_seconds")) == [5, 9]
    assert 0 < line["memory/layer_1/gate_mean"] < 1
    saved = {path.name for path in (run_dir / "checkpoints").glob("step-*")}
    assert saved == {"step-12", "step-8"}
    position = read_position(newest_checkpoint(run_dir))
    assert (position.consumed, position.precision) == (12 * 8, "fp32")


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
    assert steps > 4
    explicit = make_config(training={"max_steps": steps})
    train(explicit, dataset, tmp_path / "explicit")
    with claim_run(asked, "key", dataset) as run_dir:
        assert (last_step(run_dir), is_finished(run_dir)) == (None, False)
        assert train(asked, dataset, run_dir, [StopAfter(2)]).stopped_by == signal.SIGTERM
        train(asked, dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "explicit")
    assert weights(run_dir) == weights(tmp_path / "explicit")
    assert last_step(run_dir) == read_status(run_dir).total == steps
    assert read_position(newest_checkpoint(run_dir)).last_step(asked) == steps
    record_evaluation(run_dir, steps, "key", {})
    assert is_finished(run_dir)


def test_accumulated_micro_batches_are_one_batch(dataset, make_config, tmp_path):
    packing = {"mode": "document", "remainder": "pad"}
    for name, size, accumulation in (("whole", 8, 1), ("parts", 2, 4)):
        config = make_config(
            packing=packing,
            training={"batch_size": size, "gradient_accumulation_steps": accumulation},
        )
        train(config, dataset, tmp_path / name)
    assert curve(tmp_path / "parts", "train/loss") == pytest.approx(
        curve(tmp_path / "whole", "train/loss"), abs=2e-5
    )
    assert curve(tmp_path / "parts", "train/grad_norm") == pytest.approx(
        curve(tmp_path / "whole", "train/grad_norm"), rel=1e-3
    )


def test_a_stop_takes_effect_in_the_next_step_and_is_saved(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    for step, number in ((0, signal.SIGTERM), (6, signal.SIGINT)):
        outcome = train(make_config(), dataset, run_dir, [StopAfter(step, number)])
        assert outcome.stopped_by == number
        assert step <= outcome.step <= step + 1
        assert newest_checkpoint(run_dir).name == f"step-{outcome.step}"


def test_non_finite_numbers_end_the_training_before_the_step(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    config = make_config(
        training={"learning_rate": 1e30}, checkpoint={"save_steps": 1}, logging={"debug": True}
    )
    with pytest.raises(NonFiniteError, match="the step was not taken") as caught:
        train(config, dataset, run_dir)
    step = int(str(caught.value).split(":")[0].removeprefix("step "))
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint.name == f"step-{step - 1}"
    parameters = load_file(checkpoint / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in parameters.values())
    report = run_dir / "debug" / f"step-{step}" / "rank-0"
    assert f"Step: {step}" in (report / "report.txt").read_text()
    assert json.loads((report / "report.json").read_text())["faults"]
    saved = load_file(report / "tensors.safetensors")
    assert saved["batch/0/input_ids"].shape == (8, 64)


def test_16_bits_learn_as_well_and_weights_are_kept_in_float32(dataset, make_config, tmp_path):
    train(make_config(), dataset, tmp_path / "fp32")
    exact = curve(tmp_path / "fp32", "train/loss")
    for precision, rounding in (("bf16", 0.05), ("fp16", 0.02)):
        run_dir = tmp_path / precision
        train(make_config(training={"precision": precision}), dataset, run_dir)
        rough = curve(run_dir, "train/loss")
        assert rough == pytest.approx(exact, abs=rounding)
        assert rough != exact
        assert not curve(run_dir, "train/skipped_steps")
        checkpoint = newest_checkpoint(run_dir)
        for name in ("model/model.safetensors", "optimizer.safetensors"):
            assert {t.dtype for t in load_file(checkpoint / name).values()} == {torch.float32}


def with_scale(run_dir, step, scale):
    """Change the loss scale that the checkpoint of `step` holds."""
    checkpoint = run_dir / "checkpoints" / f"step-{step}"
    state = json.loads((checkpoint / "state.json").read_text())
    state["scaler"]["scale"] = scale
    write_json(checkpoint / "state.json", state)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = sha256(checkpoint / "state.json")
    write_json(checkpoint / "manifest.json", manifest)


def test_fp16_skips_overflows_halves_its_scale_and_resumes_to_the_same_bits(
    dataset, make_config, tmp_path
):
    config = make_config(
        training={"precision": "fp16"}, checkpoint={"save_steps": 1, "save_total_limit": 12}
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
    assert kept == [kept[0]] * len(kept)
    assert tensors(large, 12) != kept[0]
    assert not set(skipped) & set(curve(large, "train/grad_norm"))

    again = cut_off(large, skipped[1], tmp_path / "again")
    train(config, dataset, again)
    assert repeatable(again) == repeatable(large)
    assert weights(again) == weights(large)


def tensors(run_dir, step):
    """The weights and moments of a checkpoint, as bytes."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return [(folder / n).read_bytes() for n in ("model/model.safetensors", "optimizer.safetensors")]


def test_settings_that_do_not_fit_the_dataset_or_the_run_are_refused(
    dataset, pairs, make_config, tmp_path
):
    run_dir = tmp_path / "run"
    train(make_config(training={"max_steps": 1}), dataset, run_dir)
    small, many = {"vocab_size": 100}, {"batch_size": 100_000}
    for config, data, folder, error in (
        (make_config(model=small), dataset, "new", r"model\.vocab_size: 100 is less than .* \d+$"),
        (make_config(model={"hidden_size": 64}), dataset, "run", r"hidden_size is 32, not 64"),
        (
            make_config(training=many, launch={"force": True}),
            dataset,
            "new",
            "too few tokens for one batch",
        ),
        (make_config(), pairs, "new", r"packing\.mode: .* need packing\.mode=document and"),
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
    assert {"put_", "cumsum", "histc"} <= names
    # `resize_` raises for a quantised tensor only.
    return {f"aten::{name}" for name in (names | RAISES | COPIES) - {"resize_"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"memory": "delta"}, "packing": {"mode": "aligned"}},
        {"training": {"objective": "block_diffusion"}},
    ],
    ids=["causal", "delta", "block_diffusion"],
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
    assert {"aten::_fused_adamw_", "infini_model::loss_and_gradients"} <= called
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
