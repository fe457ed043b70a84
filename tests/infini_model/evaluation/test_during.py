"""Samples and evaluation tasks while a model trains."""

import json
import logging
import os
import re
import signal

import pytest
from curves import curve, repeatable, weights
from stopping import StopAfter
from trained_run import make_dataset, settings
from trainings import on_two_ranks

from infini_model.config import validate
from infini_model.evaluation.context import CheckpointContext
from infini_model.evaluation.during import Measurements
from infini_model.evaluation.tasks import load_task
from infini_model.evaluation.tasks.sample import continue_document
from infini_model.runtime.errors import ConfigError, UserError
from infini_model.training.train import train

EXACT = "evaluation/passkey_token_accuracy/192"
GAIN = "evaluation/validation_loss_without_memory"
PASSKEY = {"lengths": [3], "depths": [0, 100], "trials": 3, "digits": 2}


@pytest.fixture
def measured(make_config):
    def make(**during):
        tasks = {"tasks": ["passkey", "loss_by_position"], "steps": 6} | during
        return make_config(
            logging={"eval_steps": 3, "sample_steps": 6},
            checkpoint={"save_steps": 6},
            evaluation={
                "during": tasks,
                "passkey": PASSKEY,
                "max_windows": 4,
                "sample": {"prompt_tokens": 30, "max_new_tokens": 8},
            },
        )

    return make


def without(config):
    return config.updated(logging={"sample_steps": None}, evaluation={"during": {"tasks": []}})


def samples(caplog):
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith("Sample at step")]


def test_what_is_measured_is_what_the_checkpoint_gives_and_changes_nothing(
    measured, dataset, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "infini_model")
    config, run_dir, plain = measured(), tmp_path / "measured", tmp_path / "plain"
    train(config, dataset, run_dir, [Measurements()])
    train(without(config), dataset, plain)
    assert weights(run_dir) == weights(plain)
    # Plots and parts of results are those of a checkpoint.
    assert {path.name for path in run_dir.iterdir()} == {path.name for path in plain.iterdir()}
    assert [*curve(run_dir, "validation/loss")] == [0, 3, 6, 9, 12]
    assert curve(run_dir, "train/loss") == curve(plain, "train/loss")
    for name in (EXACT, GAIN):
        assert [*curve(run_dir, name)] == [0, 6, 12]
    context = CheckpointContext(run_dir, dataset, config)
    for task, name in (("passkey", EXACT), ("loss_by_position", GAIN)):
        assert load_task(task).run(context).metrics[name] == curve(run_dir, name)[12]
    _, prompt, continuation, _ = continue_document(context)
    assert samples(caplog)[-1] == f"Sample at step 12: {prompt[-60:]!r} → {continuation!r}"
    assert [re.search(r"step (\d+)", line)[1] for line in samples(caplog)] == ["0", "6", "12"]


class StopWhileMeasuring(Measurements):
    """Receives a signal after the first answers at step 6."""

    def _advance(self, windows):
        if self._trainer.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        super()._advance(windows)


def test_a_signal_cuts_a_measurement_short_which_starts_over_when_the_run_resumes(
    measured, dataset, tmp_path
):
    config, whole, run_dir = measured(), tmp_path / "whole", tmp_path / "run"
    train(config, dataset, whole, [Measurements()])
    outcome = train(config, dataset, run_dir, [StopWhileMeasuring()])
    assert (outcome.step, outcome.stopped_by) == (6, signal.SIGTERM)
    assert [*curve(run_dir, "validation/loss")] == [0, 3]
    assert [*curve(run_dir, EXACT)] == [0]
    train(config, dataset, run_dir, [StopAfter(8), Measurements()])
    train(config, dataset, run_dir, [Measurements()])
    assert repeatable(run_dir) == repeatable(whole)
    assert weights(run_dir) == weights(whole)


def train_measured(config, dataset, run_dir, stops):
    """Train this rank; the second one receives a signal if it `stops`, while it waits."""
    rank = os.environ["RANK"]
    callback = StopWhileWaiting() if stops and rank == "1" else Measurements()
    outcome = train(config, dataset, run_dir, [callback])
    (run_dir / f"outcome-{rank}").write_text(json.dumps([outcome.step, outcome.stopped_by]))


class StopWhileWaiting(Measurements):
    def evaluation_metrics(self, evaluation):
        if evaluation.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluation_metrics(evaluation)


def test_one_rank_measures_while_the_others_wait_and_may_be_stopped(measured, dataset, tmp_path):
    config = measured()
    config = config.updated(training={"batch_size": 4})
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    on_two_ranks(train_measured, config, dataset, whole, False)
    assert [*curve(whole, EXACT)] == [0, 6, 12]
    on_two_ranks(train_measured, config, dataset, run_dir, True)
    outcomes = [json.loads((run_dir / f"outcome-{rank}").read_text()) for rank in (0, 1)]
    assert outcomes == [[6, signal.SIGTERM]] * 2
    assert [*curve(run_dir, "validation/loss")] == [0, 3]
    on_two_ranks(train_measured, config, dataset, run_dir, False)
    assert repeatable(run_dir) == repeatable(whole)


def test_a_task_or_a_sample_that_fails_does_not_end_the_training(
    measured, dataset, tmp_path, caplog, monkeypatch
):
    (tmp_path / "beams.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "beams.yaml").write_text(
        "task: beams\ndataset_path: json\ntest_split: test\noutput_type: generate_until\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/beams.jsonl}}}}\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {num_beams: 4, until: []}\n"
    )

    def fail(context):
        raise MemoryError(f"of {context.name}")

    monkeypatch.setattr("infini_model.evaluation.during.continue_document", fail)
    config = measured(tasks=["lm_eval", "passkey"], steps=12)
    lm_eval = {"tasks": ["beams"], "include_path": tmp_path}
    config = config.updated(evaluation={"lm_eval": lm_eval})
    assert train(config, dataset, tmp_path / "run", [Measurements()]).step == 12
    assert [*curve(tmp_path / "run", EXACT)] == [0, 12]
    said = [r.getMessage() for r in caplog.records if " failed: " in r.getMessage()]
    places = [line.partition(":")[0] for line in said]
    assert places == ["step 0", "step 0", "step 6", "step 12", "step 12"]
    named = [(line.split(": ", 1)[1].partition(" failed")[0], line) for line in said]
    sample, task = "logging.sample_steps", "evaluation.during: lm_eval"
    assert [name for name, _ in named] == [sample, task, sample, sample, task]
    reasons = {sample: "MemoryError('of step ", task: "num_beams is not supported"}
    assert all(reasons[name] in line for name, line in named)


def test_what_cannot_be_measured_is_refused_before_the_first_step(measured, dataset, tmp_path):
    short = measured(tasks=["passkey"])
    short = short.updated(evaluation={"passkey": {"digits": 18, "needles": 16}})
    with pytest.raises(UserError, match=r"evaluation\.passkey\.lengths: 3 x packing"):
        train(short, dataset, tmp_path / "short", [Measurements()])
    assert not curve(tmp_path / "short", "validation/loss")
    splits = {"train": 0.7, "validation": 0.0, "test": 0.3}
    config = settings(tmp_path, **{"data.splits": splits, "logging.sample_steps": 50})
    with pytest.raises(ConfigError, match="follow a validation, for which split validation of "):
        train(config, make_dataset(tmp_path, config), tmp_path / "none", [Measurements()])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"logging": {"sample_steps": 75}},
            "logging.sample_steps: 75 is not a multiple of logging",
        ),
        (
            {"evaluation": {"during": {"tasks": ["passkey"], "steps": 20}}},
            "evaluation.during.steps: 20 is not a multiple of logging.eval_steps 50",
        ),
        (
            {"logging": {"sample_steps": 50}, "launch": {"strategy": "fsdp"}},
            "logging.sample_steps: needs launch.strategy=ddp",
        ),
        ({"evaluation": {"during": {"tasks": ["loss"]}}}, "evaluation.during.tasks.0"),
    ],
)
def test_conflicts_are_named(tree, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(tree)
    assert validate({"evaluation": {"during": {"steps": 20}}})
