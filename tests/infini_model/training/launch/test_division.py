import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import TrainingConfig
from infini_model.runtime.errors import ConfigError
from infini_model.training.launch.division import Division, divide

small = st.integers(1, 12)


def settings(batch_size, accumulation):
    return TrainingConfig(batch_size=batch_size, gradient_accumulation_steps=accumulation)


@given(small, small, small)
def test_the_first_start_and_a_resume_divide_the_batch_alike(batch, steps, processes):
    first = divide(settings(batch, steps), processes, None)
    assert first == Division(processes, steps, batch)
    assert divide(settings(batch, steps), processes, first.global_batch) == first


@given(st.integers(1, 96), small, small, small)
def test_any_number_of_processes_reads_the_same_windows_within_the_batch_size(
    global_batch, batch, steps, processes
):
    if global_batch % processes:
        with pytest.raises(ConfigError, match=rf"launch\.processes: {processes} .*{global_batch}"):
            divide(settings(batch, steps), processes, global_batch)
        return
    division = divide(settings(batch, steps), processes, global_batch)
    assert division.global_batch == global_batch
    share = global_batch // processes
    allowed = [size for size in range(1, min(batch, share) + 1) if share % size == 0]
    assert division.micro_batch == max(allowed)
