"""The training loop in this process, compared with trainings on two processes."""

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
from torch.nn.modules.module import register_module_forward_pre_hook
from trainings import on_two_ranks

from infini_model.data.loading.windows import open_windows
from infini_model.model.layers import DecoderLayer
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import is_finished, last_step, record_evaluation
from infini_model.runtime.storage import sha256, write_json
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.loop import train
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
    assert [p.name for p in sorted((run_dir / "checkpoints").glob("step-*"))] == [
        "step-12",
        "step-8",
    ]
    position = read_position(newest_checkpoint(run_dir))
    assert (position.consumed, position.precision) == (12 * 8, "fp32")


def test_the_export_is_the_last_model_and_opens_by_itself(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    train(make_config(), dataset, run_dir)
    trained = InfiniLlama.from_pretrained(newest_checkpoint(run_dir) / "model").state_dict()
    for missing in (False, True):
        if missing:
            # As after a kill between the last checkpoint and the export.
            shutil.rmtree(run_dir / "model")
            train(make_config(), dataset, run_dir)
        exported = InfiniLlama.from_pretrained(run_dir / "model").state_dict()
        assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())


def test_the_log_line_has_the_documented_form(dataset, make_config, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        train(make_config(), dataset, tmp_path / "run")
    lines = [r.getMessage() for r in caplog.records if "Loss:" in r.getMessage()]
    assert len(lines) == 6
    pattern = (
        r"Step \[\d+/12\] \| Loss: \d\.\d{4} \| LR: \d\.\d\de-\d\d \| "
        r"Grad Norm: \d\.\d{4} \| Epoch: \d+\.\d\d \| ETA: \d+:\d\d"
    )
    for line in lines:
        assert re.fullmatch(pattern, line)


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


@pytest.mark.parametrize(
    "packing",
    [{"mode": "packed"}, {"mode": "document", "remainder": "pad"}, {"mode": "aligned"}],
    ids=lambda packing: packing["mode"],
)
def test_accumulated_micro_batches_are_one_batch(dataset, make_config, tmp_path, packing):
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


def test_activation_checkpointing_trains_to_the_same_bits(dataset, make_config, tmp_path):
    calls = []

    def count(module, *_):
        if isinstance(module, DecoderLayer) and module.training:
            calls.append(module)

    hook = register_module_forward_pre_hook(count)
    settings = {
        "packing": {"mode": "aligned"},
        "training": {"max_steps": 3},
        "evaluation": {"max_windows": 8},
    }
    for name in ("kept", "again"):
        again = {"gradient_checkpointing": name == "again"}
        train(make_config(**settings, launch=again), dataset, tmp_path / name)
    hook.remove()
    assert len(calls) == 3 * 2 * (1 + 2)
    assert weights(tmp_path / "again") == weights(tmp_path / "kept")
    assert repeatable(tmp_path / "again") == repeatable(tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.story
def test_two_processes_match_the_curve_of_one(dataset, make_config, tmp_path):
    """In every packing mode, with masked labels, and when the gates get no gradient."""
    cases = {
        "packed": {"packing": {"mode": "packed"}},
        "document": {"packing": {"mode": "document", "remainder": "pad"}},
        "aligned": {
            "packing": {"mode": "aligned"},
            "training": {"gradient_accumulation_steps": 2, "batch_size": 2},
        },
        "one-segment": {"packing": {"context_length": 16}},
        "recomputed": {"launch": {"gradient_checkpointing": True}},
        "recomputed one-segment": {
            "packing": {"context_length": 16},
            "launch": {"gradient_checkpointing": True},
        },
    }
    for name, sections in cases.items():
        training = {"batch_size": 4, "max_steps": 6} | sections.get("training", {})
        pair = make_config(**sections | {"training": training})
        on_two_ranks(train, pair, dataset, tmp_path / f"{name}-2")
        whole = training | {"batch_size": 2 * training["batch_size"]}
        train(make_config(**sections | {"training": whole}), dataset, tmp_path / f"{name}-1")
        for metric in ("train/loss", "validation/loss", "test/loss"):
            one, two = curve(tmp_path / f"{name}-1", metric), curve(tmp_path / f"{name}-2", metric)
            assert one
            assert two == pytest.approx(one, abs=5e-5), (name, metric)


def test_a_run_keeps_its_global_batches_with_smaller_micro_batches(dataset, make_config, tmp_path):
    """As after running out of memory; validation covers the same number of windows."""
    settings, short = {"batch_size": 4, "gradient_accumulation_steps": 2}, {"max_windows": 6}
    train(make_config(training=settings, evaluation=short), dataset, tmp_path / "whole")
    for batch_size in (3, 1):
        run_dir = tmp_path / str(batch_size)
        shutil.copytree(tmp_path / "whole", run_dir)
        shutil.rmtree(run_dir / "checkpoints" / "step-12")
        less = settings | {"batch_size": batch_size}
        train(make_config(training=less, evaluation=short), dataset, run_dir)
        position = read_position(newest_checkpoint(run_dir))
        assert (position.step, position.consumed, position.global_batch) == (12, 96, 8)
        for name in ("train/loss", "validation/loss", "test/loss"):
            whole, parts = curve(tmp_path / "whole", name), curve(run_dir, name)
            assert parts == pytest.approx(whole, abs=2e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_training_resumes_to_the_same_bits(dataset, make_config, tmp_path, number):
    config = make_config()
    train(config, dataset, tmp_path / "whole")
    run_dir = tmp_path / "parts"
    outcome = train(config, dataset, run_dir, [StopAfter(6, number)])
    # The signal came after step 6 and is acted on in the next step.
    assert (outcome.stopped_by, outcome.step) == (number, 7)
    assert newest_checkpoint(run_dir).name == "step-7"
    assert train(config, dataset, run_dir).stopped_by is None
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


def test_a_stop_before_the_first_step_saves_a_checkpoint(dataset, make_config, tmp_path):
    config = make_config()
    run_dir = tmp_path / "run"
    outcome = train(config, dataset, run_dir, [StopAfter(0)])
    assert outcome.step <= 1
    assert newest_checkpoint(run_dir).name == f"step-{outcome.step}"


def test_a_finished_training_is_left_unchanged(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    train(make_config(), dataset, run_dir)
    before = (repeatable(run_dir), weights(run_dir))
    train(make_config(), dataset, run_dir)
    assert (repeatable(run_dir), weights(run_dir)) == before


def test_a_damaged_checkpoint_falls_back_to_the_previous_one_and_the_same_bits(
    dataset, make_config, tmp_path, caplog
):
    run_dir = tmp_path / "run"
    train(make_config(), dataset, run_dir)
    before = (repeatable(run_dir), weights(run_dir))
    file = newest_checkpoint(run_dir) / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        train(make_config(), dataset, run_dir)
    assert str(file) in caplog.text
    assert (repeatable(run_dir), weights(run_dir)) == before


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
    text = (report / "report.txt").read_text()
    assert "[GPU 0]" in text
    assert f"Step: {step}" in text
    faults = json.loads((report / "report.json").read_text())["faults"]
    saved = load_file(report / "tensors.safetensors")
    assert saved["batch/0/input_ids"].shape == (8, 64)
    assert faults
    for fault in faults:
        assert fault["name"] in text
        tensor = saved[f"{fault['kind'].lower()}/{fault['name']}"]
        assert int(tensor.isnan().sum()) == fault["nan"]
        assert int(tensor.isinf().sum()) == fault["infinite"]


def test_bf16_learns_as_well_and_keeps_its_weights_in_float32(dataset, make_config, tmp_path):
    train(make_config(), dataset, tmp_path / "fp32")
    train(make_config(training={"precision": "bf16"}), dataset, tmp_path / "bf16")
    exact, rough = (curve(tmp_path / name, "train/loss") for name in ("fp32", "bf16"))
    assert rough == pytest.approx(exact, abs=0.05)
    assert rough != exact
    checkpoint = newest_checkpoint(tmp_path / "bf16")
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        assert {t.dtype for t in load_file(checkpoint / name).values()} == {torch.float32}


def truncate_with_scale(run_dir, step, scale):
    """Truncate an fp16 run after the checkpoint of `step` and change its loss scale."""
    for path in (run_dir / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    checkpoint = run_dir / "checkpoints" / f"step-{step}"
    state = json.loads((checkpoint / "state.json").read_text())
    state["scaler"]["scale"] = scale or state["scaler"]["scale"]
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
    train(make_config(), dataset, tmp_path / "fp32")
    rough, exact = (curve(tmp_path / name, "train/loss") for name in ("fp16", "fp32"))
    assert rough == pytest.approx(exact, abs=0.02)
    assert rough != exact
    assert not curve(tmp_path / "fp16", "train/skipped_steps")

    large = tmp_path / "large"
    shutil.copytree(tmp_path / "fp16", large)
    truncate_with_scale(large, 4, 2.0**22)
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

    again = tmp_path / "again"
    shutil.copytree(large, again)
    truncate_with_scale(again, skipped[1], None)
    train(config, dataset, again)
    assert repeatable(again) == repeatable(large)
    assert weights(again) == weights(large)


def tensors(run_dir, step):
    """The weights and moments of a checkpoint, as bytes."""
    folder = run_dir / "checkpoints" / f"step-{step}"
    return [(folder / n).read_bytes() for n in ("model/model.safetensors", "optimizer.safetensors")]


def test_a_vocabulary_too_small_for_the_dataset_is_refused(dataset, make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.vocab_size: 100 is less than .* \d+$"):
        train(make_config(model={"vocab_size": 100}), dataset, tmp_path)


def test_a_run_folder_of_another_model_is_refused(dataset, make_config, tmp_path):
    train(make_config(), dataset, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"model\.hidden_size is 32, not 64"):
        train(make_config(model={"hidden_size": 64}), dataset, tmp_path / "run")


def test_a_batch_larger_than_the_dataset_is_refused(dataset, make_config, tmp_path):
    config = make_config(training={"batch_size": 100_000}, launch={"force": True})
    with pytest.raises(DataError, match="too few tokens for one batch"):
        train(config, dataset, tmp_path / "run")
