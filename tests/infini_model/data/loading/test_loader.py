"""The order of windows depends on two integers, not on the number of processes.

The functions of the former GPU data loader give what the data pipeline gives, on any device.
"""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import stream_of, write_shard
from templates import with_bos

from infini_model.config import PackingConfig
from infini_model.data.loading.gpu import (
    get_gpu_train_dataloader,
    gpu_clm_process,
)
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import (
    Windows,
    open_windows,
    permute,
    sample_windows,
    validation_batches,
)
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime.errors import DataError


@pytest.fixture(scope="module")
def windows(byte_dataset):
    return open_windows(byte_dataset, "train", PackingConfig(context_length=64), 16)


def joined(batches):
    return torch.cat([batch.tokens for batch in batches])


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_the_order_of_an_epoch_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size, seed, np.full(size, epoch))
    assert sorted(order.tolist()) == list(range(size))


def test_epochs_and_seeds_differ_windows_are_mixed_and_the_order_never_changes():
    size = 1000
    orders = [
        permute(np.arange(size), size, seed, np.full(size, epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for order, other in zip(orders, [*orders[1:], orders[0]], strict=True):
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.15
        assert np.count_nonzero(order == other) < 10
    # Old checkpoints must resume with the same windows in later versions.
    order = permute(np.arange(10), 10, 7, np.zeros(10, np.int64))
    assert order.tolist() == [9, 3, 2, 8, 4, 6, 7, 1, 5, 0]


def test_resuming_at_every_position_gives_the_remaining_batches(byte_dataset):
    few = open_windows(byte_dataset, "test", PackingConfig(context_length=1024), 16)
    options = {"batch_size": 4, "gradient_accumulation_steps": 2, "seed": 1}
    steps = len(few) // 8 + 3
    with Loader(few, **options) as loader:
        whole = [joined(batches) for batches in islice(loader, steps)]
        assert loader.samples_seen == steps * 8
    # An epoch holds each window once, the next one in another order.
    count, rows = len(few), torch.cat(whole)
    assert sorted(rows[:count].tolist()) == sorted(few.gather(np.arange(count)).tokens.tolist())
    assert not torch.equal(rows[count:], rows[: len(rows) - count])
    for done in range(steps):
        with Loader(few, **options, samples_seen=done * 8) as loader:
            assert torch.equal(joined(next(loader)), whole[done])
            assert loader.samples_seen == (done + 1) * 8


@settings(max_examples=10)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.sampled_from([1, 2]),
    st.integers(0, 500),
    st.sampled_from([1, 5 * 6 * 64, 1 << 20]),
)
def test_any_number_of_processes_sees_the_same_global_batches(
    windows, world_size, accumulation, samples_seen, tokens_at_once
):
    with Loader(windows, batch_size=24, seed=5, samples_seen=samples_seen) as loader:
        whole = [joined(next(loader)) for _ in range(2)]
    parts, keys = [], []
    for rank in range(world_size):
        with Loader(
            windows,
            batch_size=24 // world_size // accumulation,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world_size,
            seed=5,
            samples_seen=samples_seen,
            tokens_at_once=tokens_at_once,
        ) as loader:
            numbers = loader.numbers(samples_seen)
            parts.append([next(loader) for _ in range(2)])
            assert loader.samples_seen == samples_seen + 48
        for batch, chosen in zip(parts[-1][0], numbers, strict=True):
            assert torch.equal(batch.tokens, windows.gather(chosen).tokens)
        keys += [key for step in parts[-1] for batch in step for key in batch.keys.tolist()]
    # Each window of a training has a key of its own, in all epochs.
    assert sorted(keys) == list(range(samples_seen, samples_seen + 48))
    for step in range(2):
        assert all(len(part[step]) == accumulation for part in parts)
        together = torch.cat([joined(part[step]) for part in parts])
        assert torch.equal(together, whole[step])


def test_too_few_tokens_for_one_batch_is_an_error_in_one_line(windows):
    with pytest.raises(
        DataError, match=r"too few tokens for one batch: .*split train has"
    ) as caught:
        Loader(windows, batch_size=len(windows), world_size=2)
    assert "\n" not in str(caught.value)


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


def assert_same(mine, theirs):
    """Two batches have the same numbers, wherever they are."""
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None and other is None) or torch.equal(one.cpu(), other)


def test_the_gpu_dataloader_is_a_loader(byte_dataset, each_device):
    packing = PackingConfig(mode="aligned", context_length=64)
    options = {"batch_size": 3, "gradient_accumulation_steps": 2, "seed": 2, "samples_seen": 6}
    with (
        get_gpu_train_dataloader(byte_dataset, packing, 16, **options, device=each_device) as one,
        Loader(open_windows(byte_dataset, "train", packing, 16), **options) as other,
    ):
        # More steps than are read ahead, so that buffers are used again.
        for _ in range(20):
            for mine, theirs in zip(next(one), next(other), strict=True):
                assert mine.tokens.device.type == each_device.type
                assert_same(mine, theirs)


@pytest.mark.parametrize("begun", [False, True])
def test_windows_of_texts_match_those_of_their_dataset(tmp_path, texts, each_device, begun):
    host = train_tokenizer([texts], 300)
    if begun:
        host = BPETokenizer("x", with_bos(host.text))
    windows = gpu_clm_process(texts, host, 32, each_device)
    assert torch.equal(windows.cpu(), as_a_dataset(tmp_path, texts, host, 32))


def as_a_dataset(tmp_path, texts, host, length):
    """The windows of a dataset of the texts."""
    ids, offsets = host.encode_batch(texts)
    bos = [] if host.bos_token_id is None else [host.bos_token_id]
    documents = [[*bos, *row, host.eos_token_id] for row in np.split(ids, offsets[1:-1])]
    closed = np.concatenate(documents, dtype=np.int32)
    shard = write_shard(tmp_path / "texts.arrow", closed, [len(each) for each in documents])
    stream = stream_of(tmp_path, [shard])
    rows = pack(stream, PackingConfig(context_length=length), 8)
    windows = Windows(stream, rows, aligned=False, name="texts")
    assert len(windows) > 50
    return windows.gather(np.arange(len(windows))).tokens.squeeze(1)


@pytest.mark.cuda
def test_windows_of_a_gpu_tokenizer_match_those_of_the_dataset(tmp_path, texts, gpu):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu.device import DeviceTokenizer

    texts = texts[:3]
    host = BPETokenizer("x", with_bos(train_tokenizer([texts], 300).text))
    windows = gpu_clm_process(texts, DeviceTokenizer(host, gpu, 1 << 12), 8, gpu)
    assert torch.equal(windows.cpu(), as_a_dataset(tmp_path, texts, host, 8))
    assert gpu_clm_process(["a"], ByteTokenizer(), 4, gpu).shape == (0, 5)
