"""Batches that grow during a training."""

import itertools
import logging
import math

import pytest
from curves import curve, weights
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import TrainingConfig, validate
from infini_model.data.manifest import read_manifest
from infini_model.runtime.branches import branch_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training.checkpoint import read_state
from infini_model.training.memory_estimate import estimate_memory
from infini_model.training.train import train

WINDOW = 64
GROWING = {"batch_schedule": {0: 1, 0.3: 2, 0.75: 4}, "max_steps": 8, "batch_size": 4}
# Of the steps 1 to 8.
BATCHES = [1, 1, 1, 2, 2, 2, 4, 4]


@given(
    st.dictionaries(st.floats(0.01, 0.99), st.integers(1, 9), max_size=4),
    st.integers(1, 9),
    st.integers(1, 60),
    st.data(),
)
def test_steps_take_what_the_schedule_says_and_batches_become_steps_again(
    later, first, total, data
):
    schedule = {0.0: first, **later}
    training = TrainingConfig(batch_schedule=schedule, max_steps=total)
    taken = [training.batches_by(step + 1) - training.batches_by(step) for step in range(total)]
    for step, count in enumerate(taken):
        assert count == schedule[max(at for at in schedule if math.ceil(at * total) <= step)]
    assert training.batches_by(total) == sum(taken)
    before = data.draw(st.integers(0, total))
    batches = data.draw(st.integers(1, 200))
    steps = training.steps_of(batches, before)

    def left(steps):
        whole = training.updated(max_steps=steps)
        return whole.batches_by(steps) - whole.batches_by(before)

    assert left(steps) >= batches > left(steps - 1)


def test_two_batches_a_step_are_two_accumulated(make_config, dataset, tmp_path):
    schedule = {"batch_schedule": {0: 2}, "batch_size": 4}
    train(make_config(training=schedule), dataset, tmp_path / "scheduled")
    accumulated = {"gradient_accumulation_steps": 2, "batch_size": 4}
    train(make_config(training=accumulated), dataset, tmp_path / "accumulated")
    assert weights(tmp_path / "scheduled") == weights(tmp_path / "accumulated")


def test_tokens_are_counted(make_config, dataset, tmp_path, caplog):
    caplog.set_level(logging.INFO, "infini_model")
    config = make_config(training=GROWING)
    train(config, dataset, tmp_path / "whole")
    tokens = [sum(BATCHES[:step]) * 4 * WINDOW for step in range(1, 9)]
    assert [*curve(tmp_path / "whole", "train/tokens").values()] == tokens
    assert read_state(newest_checkpoint(tmp_path / "whole")).windows_read * WINDOW == tokens[-1]
    said = [record.getMessage() for record in caplog.records]
    assert "Batches of a step: 1 from step 0, 2 from step 3, 4 from step 6" in said


def test_epochs_become_the_steps_that_read_them(make_config, dataset, tmp_path):
    epochs = GROWING | {"max_steps": None, "epochs": 0.2}
    train(make_config(training=epochs), dataset, tmp_path)
    state = read_state(newest_checkpoint(tmp_path))
    windows = 0.2 * 449
    last = 4 * 4
    assert windows <= state.windows_read < windows + last
    counts = [*curve(tmp_path, "train/tokens").values()]
    grown = {(after - before) // WINDOW for before, after in itertools.pairwise([0, *counts])}
    assert grown == {4, 8, 16}


def test_a_branch_reads_on_from_where_its_parent_was(make_config, dataset):
    def run(config):
        with claim_run(config, read_manifest(dataset).key, dataset) as run_dir:
            train(config, dataset, run_dir)
        return run_dir

    whole = run(make_config(run={"name": "whole", "seed": 3}, training=GROWING))
    longer = {"max_steps": 16, "batch_schedule": {0: 4}}
    branch = run(branch_config(whole, 8, [{"training": longer}]))
    read = sum(BATCHES) * 4
    first = curve(branch, "train/tokens")[9] / WINDOW
    assert first == read + 4 * 4
    assert read_state(newest_checkpoint(branch)).windows_read == read + 8 * 4 * 4


def test_a_run_of_epochs_may_have_become_shorter_than_its_warm_up_and_decay(make_config, dataset):
    """What such a run decided for itself is no reason to refuse a branch of it."""
    epochs = {"epochs": 0.1, "max_steps": None, "warmup_steps": 4, "decay_steps": 4}
    config = make_config(run={"name": "short", "seed": 3}, training=epochs)
    with claim_run(config, read_manifest(dataset).key, dataset) as run_dir:
        train(config, dataset, run_dir)
    end = read_state(newest_checkpoint(run_dir)).step
    assert end < 8
    branch = branch_config(run_dir, end, [{"training": {"max_steps": end + 8, "epochs": None}}])
    with claim_run(branch, read_manifest(dataset).key, dataset) as run_dir:
        train(branch, dataset, run_dir)
    assert read_state(newest_checkpoint(run_dir)).step == end + 8


def test_what_accumulates_is_estimated_alike(make_config):
    accumulated = {"gradient_accumulation_steps": 4}
    estimates = [
        estimate_memory(make_config(training=training, model={"vocab_size": 256}), 1, "cpu")
        for training in (accumulated, {"batch_schedule": {0: 1, 0.5: 4}}, {})
    ]
    assert estimates[0] == estimates[1] != estimates[2]


@pytest.mark.parametrize(
    "schedule", [{}, {0.5: 2}, {0: 0}, {0: 1, 1: 2}, {0: 1.5}, {0: 1, 0.5: 17}]
)
def test_a_schedule_begins_at_0_and_counts_whole_batches(schedule):
    with pytest.raises(ConfigError, match=r"training\W+batch_schedule"):
        validate({"training": {"batch_schedule": schedule}})
