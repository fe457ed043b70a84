"""The order of windows depends on two integers, not on the number of processes."""

from itertools import islice

import numpy as np
import pytest
import torch
from corpora import build, files_config, write_files
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.permutation import permute
from infini_model.data.loading.validation import sample_windows, validation_batches
from infini_model.data.loading.windows import open_windows
from infini_model.runtime.errors import DataError

PACKING = PackingConfig(context_length=64)


@pytest.fixture(scope="module")
def windows(byte_dataset):
    return open_windows(byte_dataset, "train", PACKING, 16)


def joined(batches):
    return torch.cat([batch.tokens for batch in batches])


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_the_order_of_an_epoch_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size, seed, np.full(size, epoch))
    assert sorted(order.tolist()) == list(range(size))


def test_epochs_and_seeds_differ_and_windows_are_mixed():
    size = 1000
    orders = [
        permute(np.arange(size), size, seed, np.full(size, epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for order, other in zip(orders, [*orders[1:], orders[0]], strict=True):
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.15
        assert np.count_nonzero(order == other) < 10


def test_the_order_never_changes():
    # Old checkpoints must resume with the same windows in later versions.
    order = permute(np.arange(10), 10, 7, np.zeros(10, np.int64))
    assert order.tolist() == [9, 3, 2, 8, 4, 6, 7, 1, 5, 0]


def test_an_epoch_holds_each_window_once_and_the_next_in_another_order(windows):
    count = len(windows)
    with Loader(windows, batch_size=1, seed=3) as loader:
        seen, again = (joined([next(loader)[0] for _ in range(count)]) for _ in range(2))
    everything = windows.gather(np.arange(count)).tokens
    for epoch in (seen, again):
        assert sorted(epoch.tolist()) == sorted(everything.tolist())
    assert not torch.equal(seen, again)


def test_resuming_at_every_position_gives_the_remaining_batches(byte_dataset):
    few = open_windows(byte_dataset, "test", PackingConfig(context_length=1024), 16)
    options = {"batch_size": 4, "gradient_accumulation_steps": 2, "seed": 1}
    steps = len(few) // 8 + 3
    with Loader(few, **options) as loader:
        whole = [joined(batches) for batches in islice(loader, steps)]
        assert loader.consumed == steps * 8
    for done in range(steps):
        with Loader(few, **options, consumed=done * 8) as loader:
            assert torch.equal(joined(next(loader)), whole[done])
            assert loader.consumed == (done + 1) * 8


def test_batches_do_not_depend_on_how_many_are_gathered_at_once(windows):
    options = {"batch_size": 3, "gradient_accumulation_steps": 2, "world_size": 2, "rank": 1}
    steps = 2 * len(windows) // 12
    seen = []
    for tokens in (1, 5 * 6 * 64, 1 << 20):
        with Loader(windows, **options, consumed=7, tokens_at_once=tokens) as loader:
            seen.append([batch for _ in range(steps) for batch in next(loader)])
            assert loader.consumed == 7 + steps * 12
    assert torch.equal(joined(seen[0]), joined(seen[1]))
    assert torch.equal(joined(seen[0]), joined(seen[2]))
    assert all(batch.tokens.shape == (3, 1, 65) for batches in seen for batch in batches)


@settings(max_examples=15)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2]), st.integers(0, 500))
def test_any_number_of_processes_sees_the_same_global_batches(
    windows, world_size, accumulation, consumed
):
    with Loader(windows, batch_size=24, seed=5, consumed=consumed) as loader:
        whole = [joined(next(loader)) for _ in range(2)]
    parts = []
    for rank in range(world_size):
        with Loader(
            windows,
            batch_size=24 // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world_size,
            seed=5,
            consumed=consumed,
        ) as loader:
            parts.append([next(loader) for _ in range(2)])
    for step in range(2):
        assert all(len(part[step]) == accumulation for part in parts)
        together = torch.cat([joined(part[step]) for part in parts])
        assert torch.equal(together, whole[step])


def test_consumed_counts_returned_batches_not_prefetched_ones(windows):
    loader = Loader(windows, batch_size=2)
    next(loader)
    assert loader.wait_seconds > 0
    loader.close()
    loader.close()
    assert loader.consumed == 2


def test_too_few_tokens_for_one_batch_is_an_error_in_one_line(windows):
    with pytest.raises(
        DataError, match=r"too few tokens for one batch: .*split train has"
    ) as caught:
        Loader(windows, batch_size=len(windows), world_size=2)
    assert "\n" not in str(caught.value)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 40))
def test_keys_are_positions_in_the_training_order_and_numbers_the_windows(
    windows, batch_size, accumulation, world_size, start
):
    """Each window of a training has a unique key, in all epochs and at any process count."""
    options = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    together = batch_size * accumulation * world_size
    keys = []
    for rank in range(world_size):
        options |= {"rank": rank, "world_size": world_size, "consumed": start * together}
        with Loader(windows, **options) as loader:
            for _ in range(3):
                numbers = loader.numbers(loader.consumed)
                for batch, part in zip(next(loader), numbers, strict=True):
                    assert torch.equal(batch.tokens, windows.gather(part).tokens)
                    keys += batch.keys.tolist()
    assert sorted(keys) == list(range(start * together, (start + 3) * together))


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(1, 30))
def test_validation_covers_each_window_once_at_any_world_size(
    byte_dataset, batch_size, world_size, max_windows
):
    few = open_windows(byte_dataset, "validation", PackingConfig(context_length=2048), 16)
    ranks = [
        list(validation_batches(few, batch_size, rank, world_size, max_windows))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [
        row
        for step in zip(*ranks, strict=True)
        for batch in step
        for row in batch.tokens
        if batch.valid is None or batch.valid.any()
    ]
    sample = sample_windows(len(few), max_windows)
    assert torch.equal(torch.stack(rows), few.gather(sample).tokens)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_the_sample_is_spread_over_the_split_and_larger_samples_extend_it(count, size, more):
    sample = sample_windows(count, size)
    assert len(set(sample.tolist())) == len(sample) == min(count, size)
    assert sample_windows(count, None).tolist() == list(range(count))
    assert set(sample.tolist()) <= set(sample_windows(count, size + more).tolist())
    if size >= 200 and count >= 2 * size:
        assert abs(sample.mean() / count - 0.5) < 0.15


def test_a_split_without_documents_has_no_windows(tmp_path):
    config = files_config(
        write_files(tmp_path / "raw", ["one", "two"]) / "*",
        splits={"train": 1.0, "validation": 0.0, "test": 0.0},
    )
    _, folder = build(config, tmp_path)
    for mode in ("packed", "document", "aligned"):
        packing = PackingConfig(mode=mode, context_length=2)
        assert len(open_windows(folder, "train", packing, 2)) > 0
        empty = open_windows(folder, "validation", packing, 2)
        assert len(empty) == 0
        assert list(validation_batches(empty, 2)) == []
