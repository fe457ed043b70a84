"""Windows that grow during a training: the same tokens a step, in an order of each phase."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader, make_phases
from infini_model.data.loading.windows import open_windows

SEGMENT = 16
# Of 9 steps: 3 of windows of one segment, 4 of two, 2 of four.
SCHEDULE = {0.0: 1, 0.3: 2, 0.7: 4}
LENGTHS = [16] * 3 + [32] * 4 + [64] * 2
GLOBAL_BATCH = 12


@pytest.fixture(scope="module", params=["packed", "aligned"])
def begin(request, byte_dataset):
    packing = PackingConfig(mode=request.param, context_length=64, context_schedule=SCHEDULE)
    windows = open_windows(byte_dataset, "train", packing, SEGMENT)
    phases = make_phases(
        windows, packing, SEGMENT, total_steps=len(LENGTHS), global_batch=GLOBAL_BATCH
    )

    def make(world_size=1, accumulation=1, **options):
        return Loader(
            windows,
            batch_size=GLOBAL_BATCH // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
            world_size=world_size,
            phases=phases,
            seed=5,
            **options,
        )

    return make


def rows(batches):
    """The windows of a step, one a row."""
    return torch.cat([batch.tokens.flatten(1) for batch in batches])


def test_windows_grow_and_a_step_has_as_many_tokens_throughout(begin):
    with begin() as loader:
        steps = [next(loader) for _ in LENGTHS]
        for (batch,), length in zip(steps, LENGTHS, strict=True):
            assert batch.tokens[..., 1:].flatten(1).shape == (GLOBAL_BATCH * 64 // length, length)
        # The key of a window is no other's, in all phases.
        keys = torch.cat([batch.keys for (batch,) in steps]).tolist()
        assert len(set(keys)) == len(keys)
        # What a step has read can be found again.
        for step, (batch,) in enumerate(steps):
            windows = loader.windows_at(step * GLOBAL_BATCH)
            (chosen,) = loader.numbers(step * GLOBAL_BATCH)
            assert torch.equal(windows.gather(chosen).tokens, batch.tokens)


def test_each_phase_reads_in_an_order_of_its_own_without_reading_a_window_twice(begin):
    with begin() as loader:
        orders = [loader.numbers(step * GLOBAL_BATCH).reshape(-1) for step in range(len(LENGTHS))]
        for first, last in ((0, 3), (3, 7), (7, 9)):
            read = np.concatenate(orders[first:last])
            assert len(set(read.tolist())) == len(read)
        assert not set(orders[3].tolist()) <= set(orders[0].tolist())


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, len(LENGTHS)),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 5 * 6 * 64, 1 << 20]),
)
def test_resuming_anywhere_on_any_number_of_processes_gives_the_same_steps(
    begin, done, world_size, accumulation, tokens_at_once
):
    steps = len(LENGTHS) + 2
    with begin() as loader:
        whole = [rows(batches) for batches in islice(loader, steps)][done:]
    parts = []
    for rank in range(world_size):
        seen = done * GLOBAL_BATCH
        options = {"rank": rank, "samples_seen": seen, "tokens_at_once": tokens_at_once}
        with begin(world_size, accumulation, **options) as loader:
            parts.append([next(loader) for _ in whole])
            assert loader.samples_seen == steps * GLOBAL_BATCH
    for step, expected in enumerate(whole):
        assert all(len(part[step]) == accumulation for part in parts)
        assert torch.equal(torch.cat([rows(part[step]) for part in parts]), expected)
