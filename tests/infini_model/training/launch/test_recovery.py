"""How a batch is divided, and which failures are retried, with which settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import TrainingConfig
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.launch.recovery import (
    BatchPlan,
    Recovery,
    read_recovery,
    record_failure,
)


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1]), (7, [7, 1]), (12, [12, 6, 3, 1])])
def test_out_of_memory_cuts_the_micro_batch_until_it_is_one_window(make_config, batch_size, sizes):
    training = {"batch_size": batch_size, "gradient_accumulation_steps": 3}
    launch = {"gradient_checkpointing": False}
    config, recovery = make_config(training=training, launch=launch), Recovery()
    for size in sizes:
        plan = BatchPlan.of(config.training, 2, divisor=recovery.micro_batch_divisor)
        assert plan == BatchPlan(2, batch_size * 3 // size, size)
        failure = TrainingFailure("out of memory", "full", 0)
        recovery = recovery.after(failure, config)
        assert failure.is_final == (size == 1)


def test_out_of_memory_recomputes_all_layers_where_their_number_is_found(make_config):
    config, recovery = make_config(training={"batch_size": 1}), Recovery()
    for is_final in (False, True):
        assert recovery.recomputes_all is is_final
        failure = TrainingFailure("out of memory", "full", 0)
        recovery = recovery.after(failure, config)
        assert failure.is_final is is_final
        assert recovery.recomputes_all


def test_non_finite_numbers_are_retried_twice(make_config):
    config, recovery = make_config(), Recovery()
    for final in (False, False, True):
        failure = TrainingFailure("non-finite", "nan", 0)
        recovery = recovery.after(failure, config)
        assert failure.is_final is final


def test_other_failures_are_retried_unchanged(make_config):
    config, recovery = make_config(), Recovery()
    for kind in ("crash", "hang", "preempted"):
        failure = TrainingFailure(kind, "gone")
        recovery = recovery.after(failure, config)
        assert not failure.is_final
        assert recovery.attempts[-1].kind == kind
    assert recovery.micro_batch_divisor == 1


def test_failures_are_kept_in_the_run_folder_and_a_damaged_file_is_named(make_config, tmp_path):
    config = make_config()
    assert read_recovery(tmp_path) == Recovery()
    record_failure(tmp_path, TrainingFailure("out of memory", "full", 1), config)
    record_failure(tmp_path, TrainingFailure("non-finite", "nan", 0), config)
    recovery = read_recovery(tmp_path)
    assert recovery.micro_batch_divisor == 2
    assert [attempt.kind for attempt in recovery.attempts] == ["out of memory", "non-finite"]
    (tmp_path / "recovery.json").write_text("{")
    with pytest.raises(DataError, match=r"recovery\.json: is damaged"):
        read_recovery(tmp_path)


small = st.integers(1, 12)


@given(st.integers(1, 96), small, small, small, small)
def test_any_number_of_processes_reads_the_same_windows_within_the_batch_size(
    global_batch, batch, steps, processes, divisor
):
    settings = TrainingConfig(batch_size=batch, gradient_accumulation_steps=steps)
    # The first start is divided as it is set.
    first = BatchPlan.of(settings, processes)
    assert first == BatchPlan(processes, steps, batch)
    assert BatchPlan.of(settings, processes, first.global_batch) == first
    if global_batch % processes:
        with pytest.raises(ConfigError, match=rf"launch\.processes: {processes} .*{global_batch}"):
            BatchPlan.of(settings, processes, global_batch)
        return
    plan = BatchPlan.of(settings, processes, global_batch, divisor)
    assert plan.global_batch == global_batch
    share, most = global_batch // processes, max(1, batch // divisor)
    allowed = [size for size in range(1, min(most, share) + 1) if share % size == 0]
    assert plan.micro_batch == max(allowed)
