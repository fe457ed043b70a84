"""Windows of prompts and answers: each pair from its start, and nothing of another."""

import numpy as np
import pytest
import torch
from conversations import make_pairs, pair_dataset
from stored_datasets import without_shards

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.validation import validation_batches
from infini_model.data.loading.windows import open_windows
from infini_model.data.shards import writing
from infini_model.runtime.errors import ConfigError

PAIRS = make_pairs(120)
EOS = 255


def packing(length, **fields):
    return PackingConfig(
        **{"mode": "document", "remainder": "pad", "context_length": length} | fields
    )


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset of several shards a split."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 3000)
    return pair_dataset(tmp_path, PAIRS, splits={"train": 0.8, "validation": 0.2, "test": 0})


def whole(windows):
    return windows.gather(np.arange(len(windows)))


@pytest.mark.parametrize("length", [8, 100, 400, 2000])
def test_a_window_is_a_pair_cut_or_padded(dataset, length):
    windows = open_windows(dataset, "train", packing(length), 4)
    batch, seen = whole(windows), 0
    for number in range(windows.stream.documents):
        document = windows.stream.document(number)
        text = document[:-1].tobytes().decode()
        prompt = next(len(p.encode()) for p, a in PAIRS if p + a == text)
        if prompt >= length:
            continue
        row, valid = (
            batch.tokens[seen, 0],
            int(batch.valid[seen]) if batch.valid is not None else length,
        )
        assert int(batch.prompts[seen]) == prompt
        assert valid == min(len(document) - 1, length)
        assert row[: valid + 1].tolist() == document[: length + 1].tolist()
        assert (row[valid + 1 :] == EOS).all()
        seen += 1
    pairs = windows.pairs
    assert (seen, windows.stream.documents - seen) == (len(windows), pairs.skipped)
    assert pairs.cut == int((batch.tokens[:, 0, -1] != EOS).sum())
    assert (pairs.shortfall is None) == (length == 2000)


def test_what_does_not_fit_is_said_in_one_line(dataset):
    pairs = open_windows(dataset, "train", packing(100), 4).pairs
    assert min(pairs.skipped, pairs.cut) > 0
    assert pairs.shortfall == (
        f"packing.context_length=100 is too short for {pairs.skipped} prompts, which are skipped "
        f"with their answers, and for {pairs.cut} answers, which are cut"
    )


def test_an_empty_split_has_no_windows(dataset):
    assert len(open_windows(dataset, "test", packing(100), 4)) == 0


@pytest.mark.parametrize(
    "fields", [{"mode": "packed"}, {"mode": "aligned"}, {"mode": "document", "remainder": "drop"}]
)
def test_other_modes_are_refused_in_one_line(dataset, fields):
    with pytest.raises(ConfigError, match=r"packing\.mode: .* has prompts and answers, which need"):
        open_windows(dataset, "train", packing(64, **fields), 16)


def test_the_loader_and_validation_give_the_prompts_with_their_windows(dataset):
    windows = open_windows(dataset, "train", packing(400), 4)
    every = whole(windows)
    with Loader(windows, batch_size=3, gradient_accumulation_steps=2, seed=5) as loader:
        for _ in range(4):
            numbers = loader.numbers(loader.consumed)
            for batch, chosen in zip(next(loader), torch.from_numpy(numbers), strict=True):
                assert torch.equal(batch.prompts, every.prompts[chosen])
                assert torch.equal(batch.tokens, every.tokens[chosen])
    ranks = [list(validation_batches(windows, 4, rank, 2)) for rank in range(2)]
    found = torch.cat([each.prompts for both in zip(*ranks, strict=True) for each in both])
    assert torch.equal(found[: len(windows)], every.prompts)


def test_windows_of_shards_in_a_store_are_those_of_the_folder(dataset, tmp_path, bucket):
    elsewhere = without_shards(dataset, tmp_path / "elsewhere", bucket, ["train"])
    local = whole(open_windows(dataset, "train", packing(200), 4))
    distant = whole(open_windows(elsewhere, "train", packing(200), 4))
    for ours, theirs in zip(local, distant, strict=True):
        assert torch.equal(ours, theirs) if ours is not None else theirs is None
