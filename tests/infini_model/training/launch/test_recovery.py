"""How a batch is divided, and which failures are retried, with which settings."""

import itertools

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


@pytest.mark.parametrize("batch_size", [1, 6, 7, 8, 12])
def test_out_of_memory_cuts_the_micro_batch_until_it_is_one_window(make_config, batch_size):
    training = {"batch_size": batch_size, "gradient_accumulation_steps": 3}
    config = make_config(training=training)
    recovery, failure, sizes = Recovery(), OutOfMemory("full", 0), [batch_size]
    while not failure.is_final:
        recovery = recovery.after(failure := OutOfMemory("full", 0), config, step=4)
        now = recovery.applied_to(config).training
        assert now.batch_size * now.gradient_accumulation_steps == batch_size * 3
        sizes.append(now.batch_size)
    assert sizes[-1] == sizes[-2] == 1
    assert all(2 * later <= earlier for earlier, later in itertools.pairwise(sizes[:-1]))
    assert batch_size == 1 or "the same global batch" in recovery.describe(config)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(3, 2), (1, 8), (5, 1)])
def test_micro_batches_that_were_divided_anew_are_split_too(make_config, batch_size, accumulation):
    training = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    now = Recovery(micro_batch_divisor=4).applied_to(make_config(training=training)).training
    assert now.batch_size == 1
    assert now.gradient_accumulation_steps == batch_size * accumulation


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


@pytest.mark.parametrize("kind", [Crashed, Hung, Preempted, TimedOut])
def test_other_failures_are_retried_unchanged(make_config, kind):
    config = make_config()
    recovery = Recovery()
    for _ in range(5):
        failure = kind("gone")
        recovery = recovery.after(failure, config, step=3)
        assert not failure.is_final
    assert recovery.applied_to(config) == config
    assert recovery.describe(config) == f"Resuming after: {kind.kind} at step 4"


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


def settings(batch_size, accumulation):
    return TrainingConfig(batch_size=batch_size, gradient_accumulation_steps=accumulation)


@given(st.integers(1, 96), small, small, small)
def test_any_number_of_processes_reads_the_same_windows_within_the_batch_size(
    global_batch, batch, steps, processes
):
    # The first start is divided as it is set.
    first = divide(settings(batch, steps), processes, None)
    assert first == Division(processes, steps, batch)
    assert divide(settings(batch, steps), processes, first.global_batch) == first
    if global_batch % processes:
        with pytest.raises(ConfigError, match=rf"launch\.processes: {processes} .*{global_batch}"):
            divide(settings(batch, steps), processes, global_batch)
        return
    division = divide(settings(batch, steps), processes, global_batch)
    assert division.global_batch == global_batch
    share = global_batch // processes
    allowed = [size for size in range(1, min(batch, share) + 1) if share % size == 0]
    assert division.micro_batch == max(allowed)
