"""How a batch is divided, and which failures are retried, with which settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import TrainingConfig
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.training.launch.division import Division, divide
from infini_model.training.launch.failures import (
    Crashed,
    Hung,
    NonFiniteFailure,
    OutOfMemory,
    Preempted,
    TimedOut,
)
from infini_model.training.launch.recovery import Recovery, read_recovery, record_failure


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1]), (7, [7, 1]), (12, [12, 6, 3, 1])])
def test_out_of_memory_cuts_the_micro_batch_until_it_is_one_window(make_config, batch_size, sizes):
    training = {"batch_size": batch_size, "gradient_accumulation_steps": 3}
    config, recovery = make_config(training=training), Recovery()
    for size in sizes:
        now = recovery.applied_to(config).training
        assert now.batch_size == size
        assert now.batch_size * now.gradient_accumulation_steps == batch_size * 3
        recovery = recovery.after(failure := OutOfMemory("full", 0), config, step=4)
        assert failure.is_final == (size == 1)


def test_micro_batches_that_were_divided_anew_are_split_too(make_config):
    training = {"batch_size": 3, "gradient_accumulation_steps": 2}
    now = Recovery(micro_batch_divisor=4).applied_to(make_config(training=training)).training
    assert (now.batch_size, now.gradient_accumulation_steps) == (1, 6)


@pytest.mark.parametrize("skip", [False, True], ids=["repeated", "skipped"])
def test_non_finite_numbers_are_retried_twice(make_config, skip):
    config, recovery = make_config(launch={"skip_non_finite": skip}), Recovery()
    for consumed, final in ((80, False), (None, False), (88, True)):
        failure = NonFiniteFailure("nan", 0)
        failure.consumed = consumed
        recovery = recovery.after(failure, config, step=9)
        assert failure.is_final is final
    assert recovery.skipped == ((80, 88) if skip else ())
    said = "skipping the global batches at windows [80, 88]"
    assert (said in recovery.describe(config)) == skip


def test_other_failures_are_retried_unchanged(make_config):
    config, recovery = make_config(), Recovery()
    for times, kind in enumerate((Crashed, Hung, Preempted, TimedOut), 1):
        failure = kind("gone")
        recovery = recovery.after(failure, config, step=3)
        assert (failure.is_final, failure.times) == (False, times)
        assert recovery.describe(config) == f"Resuming after: {kind.kind}"
    assert recovery.applied_to(config) == config


def test_failures_are_kept_in_the_run_folder_and_a_damaged_file_is_named(make_config, tmp_path):
    config = make_config()
    assert read_recovery(tmp_path) == Recovery()
    assert read_recovery(tmp_path).describe(config) == ""
    record_failure(tmp_path, OutOfMemory("full", 1), config)
    record_failure(tmp_path, NonFiniteFailure("nan", 0), config)
    recovery = read_recovery(tmp_path)
    assert recovery.micro_batch_divisor == 2
    kinds = [(attempt.kind, attempt.rank) for attempt in recovery.attempts]
    assert kinds == [("out of memory", 1), ("non-finite", 0)]
    (tmp_path / "recovery.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"recovery\.json: is damaged"):
        read_recovery(tmp_path)


small = st.integers(1, 12)


@given(st.integers(1, 96), small, small, small)
def test_any_number_of_processes_reads_the_same_windows_within_the_batch_size(
    global_batch, batch, steps, processes
):
    settings = TrainingConfig(batch_size=batch, gradient_accumulation_steps=steps)
    # The first start is divided as it is set.
    first = divide(settings, processes, None)
    assert first == Division(processes, steps, batch)
    assert divide(settings, processes, first.global_batch) == first
    if global_batch % processes:
        with pytest.raises(ConfigError, match=rf"launch\.processes: {processes} .*{global_batch}"):
            divide(settings, processes, global_batch)
        return
    division = divide(settings, processes, global_batch)
    assert division.global_batch == global_batch
    share = global_batch // processes
    allowed = [size for size in range(1, min(batch, share) + 1) if share % size == 0]
    assert division.micro_batch == max(allowed)
