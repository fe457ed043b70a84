"""The order of windows, also of those that grow, depends on two integers and on no process.

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

from infini_model.config import PackingConfig, TrainingConfig
from infini_model.data.loading.gpu import get_gpu_train_dataloader, gpu_clm_process
from infini_model.data.loading.loader import Loader, make_phases
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


def rows(batches):
    return torch.cat([batch.tokens.flatten(1) for batch in batches])


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
        whole = [rows(batches) for batches in islice(loader, steps)]
        assert loader.windows_read == steps * 8
    # An epoch holds each window once, the next one in another order.
    count, read = len(few), torch.cat(whole)
    assert sorted(read[:count].tolist()) == sorted(rows([few.gather(np.arange(count))]).tolist())
    assert not torch.equal(read[count:], read[: len(read) - count])
    for done in range(steps):
        with Loader(few, **options, windows_read=done * 8) as loader:
            assert torch.equal(rows(next(loader)), whole[done])
            assert loader.windows_read == (done + 1) * 8


SEGMENT = 16
# Of 9 steps: 3 of windows of one segment, 4 of two, 2 of four.
SCHEDULE = {0.0: 1, 0.3: 2, 0.7: 4}
LENGTHS = [16] * 3 + [32] * 4 + [64] * 2
GLOBAL_BATCH = 12


@pytest.fixture(scope="module", params=["packed", "aligned", "of one length"])
def begin(request, byte_dataset):
    """Begins to load windows, which grow but for the last of these."""
    mode, schedule = request.param, SCHEDULE
    if mode == "of one length":
        mode, schedule = "packed", None
    packing = PackingConfig(mode=mode, context_length=64, context_schedule=schedule)
    windows = open_windows(byte_dataset, "train", packing, SEGMENT)
    training = TrainingConfig(max_steps=len(LENGTHS))
    phases = make_phases(windows, packing, SEGMENT, training, global_batch=GLOBAL_BATCH)

    def make(world_size=1, accumulation=1, **options):
        options |= {"world_size": world_size, "gradient_accumulation_steps": accumulation}
        batch_size = GLOBAL_BATCH // world_size // accumulation
        return Loader(windows, batch_size=batch_size, phases=phases, seed=5, **options)

    return make


growing = pytest.mark.parametrize("begin", ["packed", "aligned"], indirect=True)


@growing
def test_windows_grow_and_a_step_has_as_many_tokens_throughout(begin):
    with begin() as loader:
        steps = [next(loader) for _ in LENGTHS]
        for (batch,), length in zip(steps, LENGTHS, strict=True):
            assert batch.tokens[..., 1:].flatten(1).shape == (GLOBAL_BATCH * 64 // length, length)
        # The key of a window is no other's, in all phases.
        keys = torch.cat([batch.noise_keys for (batch,) in steps]).tolist()
        assert len(set(keys)) == len(keys)


@growing
def test_each_phase_reads_in_an_order_of_its_own_without_reading_a_window_twice(begin):
    with begin() as loader:
        orders = [loader.numbers(step * GLOBAL_BATCH).reshape(-1) for step in range(len(LENGTHS))]
        for first, last in ((0, 3), (3, 7), (7, 9)):
            read = np.concatenate(orders[first:last])
            assert len(set(read.tolist())) == len(read)
        assert not set(orders[3].tolist()) <= set(orders[0].tolist())


@settings(max_examples=10)
@given(
    st.integers(0, len(LENGTHS)),
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 5 * 6 * 64, 1 << 20]),
)
def test_resuming_anywhere_gives_the_same_steps(
    begin, done, world_size, accumulation, tokens_at_once
):
    steps, seen = len(LENGTHS) + 2, done * GLOBAL_BATCH
    with begin() as loader:
        whole = list(islice(loader, steps))[done:]
    parts = []
    for rank in range(world_size):
        options = {"rank": rank, "windows_read": seen, "tokens_at_once": tokens_at_once}
        with begin(world_size, accumulation, **options) as loader:
            parts.append([next(loader) for _ in whole])
            assert loader.windows_read == steps * GLOBAL_BATCH
            # What a step has read can be found again.
            for batch, chosen in zip(parts[-1][0], loader.numbers(seen), strict=True):
                assert torch.equal(batch.tokens, loader.windows_at(seen).gather(chosen).tokens)
    for step, expected in enumerate(whole):
        assert all(len(part[step]) == accumulation for part in parts)
        found = [batch for part in parts for batch in part[step]]
        assert torch.equal(rows(found), rows(expected))
        assert [key for batch in found for key in batch.noise_keys.tolist()] == expected[
            0
        ].noise_keys.tolist()


def test_a_read_that_failed_is_made_again_and_nothing_takes_its_place(windows, monkeypatch):
    with Loader(windows, batch_size=2, tokens_at_once=1) as loader:
        whole = [rows(next(loader)) for _ in range(4)]
    gather, failures = Windows.gather, iter([False, True, True])

    def failing(*arguments):
        if next(failures, False):
            raise OSError("the disk is away")
        return gather(*arguments)

    monkeypatch.setattr(Windows, "gather", failing)
    with Loader(windows, batch_size=2, tokens_at_once=1) as loader:
        read = [rows(next(loader))]
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is away"):
                next(loader)
        read += [rows(next(loader)) for _ in range(3)]
    assert torch.equal(torch.cat(read), torch.cat(whole))


def test_too_few_tokens_for_one_batch_is_an_error_in_one_line(windows):
    with pytest.raises(DataError, match=r"too few tokens for one batch: [^\n]*has[^\n]*$"):
        Loader(windows, batch_size=len(windows), world_size=2)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(1, 30))
def test_validation_covers_each_window_once(byte_dataset, batch_size, world_size, max_windows):
    few = open_windows(byte_dataset, "validation", PackingConfig(context_length=2048), 16)
    ranks = [
        list(validation_batches(few, batch_size, rank, world_size, max_windows))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for step in zip(*ranks, strict=True) for batch in step]
    found = rows([batch for batch in batches if batch.valid is None or batch.valid.any()])
    assert torch.equal(found, rows([few.gather(sample_windows(len(few), max_windows))]))


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
    options = {"batch_size": 3, "gradient_accumulation_steps": 2, "seed": 2, "windows_read": 6}
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
