"""Prompts and answers, in shards and in windows: nothing is lost, and no pair meets another."""

import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from corpora import make_pairs, make_texts, pair_dataset
from templates import with_bos

from infini_model.config import PackingConfig, SplitsConfig
from infini_model.data import make_partition
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.stream import open_split
from infini_model.data.loading.windows import open_windows, validation_batches
from infini_model.data.manifest import SPLITS, read_manifest
from infini_model.data.sources.text import hash_documents, splits_of
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.runtime.errors import ConfigError

THIRDS = {"train": 0.5, "validation": 0.25, "test": 0.25}
SPLIT_SIZES = {"train": 0.8, "validation": 0.2, "test": 0}
PAIRS = make_pairs(200)
EOS = 255


def in_shards(folder, split):
    stream = open_split(folder, split)
    prompts = [int(each) for part in stream.prompts() for each in part]
    documents = [stream.document(number) for number in range(stream.documents)]
    return [
        (document[:prompt].tolist(), document[prompt:].tolist())
        for document, prompt in zip(documents, prompts, strict=True)
    ]


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory):
    """A tokenizer that puts a token in front of every text, as that of Llama 3 does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([make_texts(50)], 400).save(folder)
    path = folder / "tokenizer.json"
    path.write_text(with_bos(path.read_text()))
    return path


@pytest.mark.parametrize("spec", ["train", "llama"])
def test_every_pair_is_in_the_shards_with_its_bound(tmp_path, spec, llama_tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(make_partition, "ENCODE_BYTES", 500)
    given = {"spec": str(llama_tokenizer) if spec == "llama" else spec, "vocab_size": 300}
    folder = pair_dataset(tmp_path, PAIRS, tokenizer=given, splits=THIRDS, batch_size=7)
    tokenizer = load_dataset_tokenizer(folder)

    def ids(text):
        return tokenizer.encode_batch([text]).ids.tolist()

    begin = [tokenizer.bos_token_id] if spec == "llama" else []
    expected = sorted(([*begin, *ids(p)], [*ids(a), tokenizer.eos_token_id]) for p, a in PAIRS)
    assert sorted(pair for split in SPLITS for pair in in_shards(folder, split)) == expected
    manifest = read_manifest(folder)
    assert (manifest.pairs, manifest.documents, manifest.corpus.skipped) == (True, len(PAIRS), 0)
    assert manifest.corpus.bytes == sum(len((p + a).encode()) for p, a in PAIRS)
    rows = [
        (row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
        for split in datasets.load_from_disk(str(folder)).values()
        for row in split
    ]
    assert sorted(rows) == expected


def packing(length, **fields):
    whole = {"mode": "document", "remainder": "pad", "context_length": length}
    return PackingConfig(**whole | fields)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset of several shards a split, and an empty split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_partition, "SHARD_BYTES", 3000)
        patch.setattr(make_partition, "ENCODE_BYTES", 500)
        folder = pair_dataset(tmp_path_factory.mktemp("pairs"), PAIRS, splits=SPLIT_SIZES)
    assert len(read_manifest(folder).splits["train"].shards) > 3
    return folder


def test_a_hash_of_prompt_and_answer_decides_the_split(dataset):
    texts = pa.array([prompt + answer for prompt, answer in PAIRS])
    numbers = splits_of(hash_documents(texts), SplitsConfig(**SPLIT_SIZES))
    for number, split in enumerate(SPLITS):
        expected = [PAIRS[place] for place in np.flatnonzero(numbers == number)]
        found = [(bytes(p).decode(), bytes(a[:-1]).decode()) for p, a in in_shards(dataset, split)]
        assert found == expected


def whole(windows):
    return windows.gather(np.arange(len(windows)))


@pytest.mark.parametrize("length", [8, 100, 2000])
def test_a_window_is_a_pair_from_its_start_cut_or_padded(dataset, length):
    windows = open_windows(dataset, "train", packing(length), 4)
    batch, seen = whole(windows), 0
    for number in range(windows.stream.documents):
        document = windows.stream.document(number)
        text = document[:-1].tobytes().decode()
        prompt = next(len(p.encode()) for p, a in PAIRS if p + a == text)
        if prompt >= length:
            continue
        row = batch.tokens[seen, 0]
        valid = length if batch.valid is None else int(batch.valid[seen])
        assert int(batch.prompts[seen]) == prompt
        assert valid == min(len(document) - 1, length)
        assert row[: valid + 1].tolist() == document[: length + 1].tolist()
        assert (row[valid + 1 :] == EOS).all()
        seen += 1
    pairs = windows.packing
    assert (seen, windows.stream.documents - seen) == (len(windows), pairs.skipped)
    assert pairs.cut == int((batch.tokens[:, 0, -1] != EOS).sum())
    said = rf"{length} is too short for {pairs.skipped} prompts, .* for {pairs.cut} answers, which"
    assert (pairs.shortfall is None) if length == 2000 else re.search(said, pairs.shortfall)


@pytest.mark.parametrize(
    "fields",
    [
        *({"mode": "packed"}, {"mode": "aligned"}, {"remainder": "drop"}),
        {"context_schedule": {0: 1, 0.5: 2}},
    ],
)
def test_other_packing_is_refused_in_one_line(dataset, fields):
    with pytest.raises(ConfigError, match=r"packing\.\w+: .* has prompts and answers, which need"):
        open_windows(dataset, "train", packing(64, **fields), 16)


def test_the_loader_and_validation_give_the_prompts_with_their_windows(dataset):
    windows = open_windows(dataset, "train", packing(400), 4)
    every = whole(windows)
    with Loader(windows, batch_size=3, seed=5) as loader:
        (chosen,) = torch.from_numpy(loader.numbers(0))
        (batch,) = next(loader)
        assert torch.equal(batch.prompts, every.prompts[chosen])
    ranks = [list(validation_batches(windows, 4, rank, 2)) for rank in range(2)]
    found = torch.cat([each.prompts for both in zip(*ranks, strict=True) for each in both])
    assert torch.equal(found[: len(windows)], every.prompts)
