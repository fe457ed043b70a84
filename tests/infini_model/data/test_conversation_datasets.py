"""Conversations in shards and in windows: each token beside whether it is learned."""

from itertools import zip_longest

import numpy as np
import pyarrow as pa
import pytest
import torch
from corpora import build, make_pairs, make_texts, pair_dataset, write_rows
from real import smollm2
from templates import with_bos
from transformers import AutoTokenizer

from infini_model.config import DataConfig, FilesSource, PackingConfig, SplitsConfig
from infini_model.data import make_partition
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.stream import open_split
from infini_model.data.loading.windows import open_windows, validation_batches
from infini_model.data.manifest import SPLITS, read_manifest
from infini_model.data.sources.text import hash_documents, splits_of
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.objectives.causal import CausalLM

THIRDS = {"train": 0.5, "validation": 0.25, "test": 0.25}
SPLIT_SIZES = {"train": 0.8, "validation": 0.2, "test": 0}
PAIRS = make_pairs(200)


def in_shards(folder, split):
    stream = open_split(folder, split)
    return [
        parted(stream.document(number), stream.learnt_of(number))
        for number in range(stream.documents)
    ]


def parted(ids, learnt):
    """A document before what is learned and from there on, which is learned to its end."""
    ids, learnt = np.asarray(ids), np.asarray(learnt)
    first = int(learnt.argmax())
    assert learnt[first:].all()
    return ids[:first].tolist(), ids[first:].tolist()


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
    folder = pair_dataset(tmp_path, PAIRS, tokenizer=given, splits=THIRDS)
    tokenizer = load_dataset_tokenizer(folder)

    def ids(text):
        return tokenizer.encode_batch([text]).ids.tolist()

    begin = [tokenizer.bos_token_id] if spec == "llama" else []
    expected = sorted(([*begin, *ids(p)], [*ids(a), tokenizer.eos_token_id]) for p, a in PAIRS)
    assert sorted(pair for split in SPLITS for pair in in_shards(folder, split)) == expected
    manifest = read_manifest(folder)
    assert manifest.conversations
    assert (manifest.corpus.documents, manifest.corpus.skipped) == (len(PAIRS), 0)
    assert manifest.corpus.bytes == sum(len((p + a).encode()) for p, a in PAIRS)
    rows = [
        parted(row["input_ids"], row["learnt"])
        for split in datasets.load_from_disk(str(folder)).values()
        for row in split
    ]
    assert sorted(rows) == expected


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
    hashes = hash_documents(texts)
    numbers = splits_of(hashes, SplitsConfig(**SPLIT_SIZES))
    for number, split in enumerate(SPLITS):
        places = np.flatnonzero(numbers == number)
        shards = open_split(dataset, split).content_hashes()
        assert [each for shard in shards for each in shard] == hashes[places, 0].tolist()
        expected = [PAIRS[place] for place in places]
        found = [(bytes(p).decode(), bytes(a[:-1]).decode()) for p, a in in_shards(dataset, split)]
        assert found == expected


MODES = [
    {"mode": "packed"},
    {"mode": "document", "remainder": "pad"},
    {"mode": "document"},
    {"mode": "aligned"},
    {"mode": "aligned", "context_schedule": {0: 1, 0.5: 2}},
]


@pytest.mark.parametrize("length", [16, 112])
@pytest.mark.parametrize("fields", MODES)
def test_in_every_packing_each_token_is_beside_whether_it_is_learned(dataset, fields, length):
    windows = open_windows(dataset, "train", PackingConfig(context_length=length, **fields), 8)
    stream = windows.stream
    tokens = np.concatenate([stream.document(n) for n in range(stream.documents)])
    learnt = np.concatenate([stream.learnt_of(n) for n in range(stream.documents)])
    batch = windows.gather(np.arange(len(windows)))
    rows = windows.packing.locate(np.arange(len(windows)))
    assert batch.learnt.shape == batch.tokens.shape
    found = zip(batch.tokens.flatten(0, 1), batch.learnt.flatten(0, 1), strict=True)
    for start, valid, (row, mask) in zip(rows.starts, rows.valid, found, strict=True):
        assert row[: valid + 1].tolist() == tokens[start : start + valid + 1].tolist()
        assert mask[: valid + 1].tolist() == learnt[start : start + valid + 1].tolist()
    if fields.get("remainder") == "pad":
        # Nothing is lost, however short the window: each learned token is a target once.
        counted = CausalLM().inputs(batch).counted
        assert int(counted.sum()) == learnt.sum() - sum(
            bool(stream.learnt_of(n)[0]) for n in range(stream.documents)
        )


def test_the_loader_and_validation_give_what_is_learned_with_their_windows(dataset):
    windows = open_windows(dataset, "train", PackingConfig(mode="aligned", context_length=64), 8)
    every = windows.gather(np.arange(len(windows))).learnt
    with Loader(windows, batch_size=3, seed=5) as loader:
        (chosen,) = torch.from_numpy(loader.numbers(0))
        (batch,) = next(loader)
        assert torch.equal(batch.learnt, every[chosen])
    ranks = [list(validation_batches(windows, 4, rank, 2)) for rank in range(2)]
    found = torch.cat([each.learnt for both in zip(*ranks, strict=True) for each in both])
    assert torch.equal(found[: len(windows)], every)


def test_every_turn_of_a_real_model_s_conversation_is_in_the_shards(tmp_path):
    """What `transformers` encodes at once, and of it what the assistant says."""
    folder = smollm2()
    theirs = AutoTokenizer.from_pretrained(folder)
    said = [f"{number} naïve 🦊 words" for number in range(6)]
    talk = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(said)]
    rows = [{"messages": talk[: 2 * turns]} for turns in (1, 2, 3)]
    path = write_rows(tmp_path / "chats.jsonl", rows)
    source = FilesSource(paths=[str(path)], pairs=True)
    splits = {"train": 1.0, "validation": 0.0, "test": 0.0}
    config = DataConfig(source=source, tokenizer={"spec": str(folder)}, splits=splits)
    stream = open_split(build(config, tmp_path)[1], "train")
    for number, row in enumerate(rows):
        ids, learnt = stream.document(number), stream.learnt_of(number)
        text = theirs.apply_chat_template(row["messages"], tokenize=False).rstrip()
        assert ids.tolist() == theirs.encode(text)
        runs = np.flatnonzero(np.diff(learnt, prepend=False)).tolist()
        spoken = [theirs.decode(ids[a:b]) for a, b in zip_longest(runs[::2], runs[1::2])]
        assert spoken == [f"{each['content']}<|im_end|>" for each in row["messages"][1::2]]
