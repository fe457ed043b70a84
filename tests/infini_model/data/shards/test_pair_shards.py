"""Shards of prompts and answers: nothing is lost, and ordinary shards stay what they were."""

import random

import numpy as np
import pyarrow as pa
import pytest
from conversations import as_rows, make_pairs, pair_dataset, pairs_config, write_rows
from corpora import build, files_config, make_texts, write_parquet
from stored_datasets import without_shards
from stores import Machine
from templates import with_bos

from infini_model.config import FilesSource, SplitsConfig
from infini_model.data.manifest import read_manifest
from infini_model.data.shards import partitions, writing
from infini_model.data.shards.partitions import slices
from infini_model.data.shards.stream import open_split
from infini_model.data.sources.content import hash_documents, splits_of
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.runtime.errors import DataError

THIRDS = {"train": 0.5, "validation": 0.25, "test": 0.25}
PAIRS = make_pairs(300)


def stored(folder, split):
    """The prompts and answers of a split, as ids."""
    stream = open_split(folder, split)
    prompts = [int(each) for part in stream.shards.prompts() for each in part]
    documents = [stream.document(number) for number in range(stream.documents)]
    return [
        (document[:prompt].tolist(), document[prompt:].tolist())
        for document, prompt in zip(documents, prompts, strict=True)
    ]


def all_stored(folder):
    return sorted(pair for split in THIRDS for pair in stored(folder, split))


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory):
    """A tokenizer that puts a token in front of every text, as that of Llama 3 does."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained = train_tokenizer([make_texts(50)], 400)
    trained.save(folder)
    path = folder / "tokenizer.json"
    path.write_text(with_bos(path.read_text()))
    return path


@pytest.mark.parametrize("spec", ["bytes", "train", "llama"])
def test_every_pair_is_in_the_shards_with_its_boundary(tmp_path, spec, llama_tokenizer):
    import datasets

    given = {"spec": str(llama_tokenizer) if spec == "llama" else spec, "vocab_size": 300}
    folder = pair_dataset(tmp_path, PAIRS, tokenizer=given, splits=THIRDS, batch_size=7)
    tokenizer = load_dataset_tokenizer(folder)

    def ids(text):
        return tokenizer.encode_batch([text]).ids.tolist()

    begin = [tokenizer.bos_token_id] if spec == "llama" else []
    expected = [([*begin, *ids(p)], [*ids(a), tokenizer.eos_token_id]) for p, a in PAIRS]
    assert all_stored(folder) == sorted(expected)
    manifest = read_manifest(folder)
    assert (manifest.pairs, manifest.documents, manifest.corpus.skipped) == (True, 300, 0)
    assert manifest.corpus.bytes == sum(len((p + a).encode()) for p, a in PAIRS)
    loaded = datasets.load_from_disk(str(folder))
    rows = [
        (row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :])
        for split in loaded.values()
        for row in split
    ]
    assert sorted(rows) == all_stored(folder)


def test_a_hash_of_prompt_and_answer_decides_the_split(tmp_path):
    folder = pair_dataset(tmp_path, PAIRS, splits=THIRDS)
    texts = pa.array([prompt + answer for prompt, answer in PAIRS])
    numbers = splits_of(hash_documents(texts), SplitsConfig(**THIRDS))
    for number, split in enumerate(("train", "validation", "test")):
        expected = [PAIRS[place] for place in np.flatnonzero(numbers == number)]
        found = [(bytes(p).decode(), bytes(a[:-1]).decode()) for p, a in stored(folder, split)]
        assert found == expected


def test_small_shards_and_batches_hold_the_same_pairs(tmp_path, monkeypatch):
    whole = pair_dataset(tmp_path / "a", PAIRS, splits=THIRDS)
    monkeypatch.setattr(writing, "SHARD_BYTES", 3000)
    monkeypatch.setattr(partitions, "ENCODE_BYTES", 500)
    parts = pair_dataset(tmp_path / "b", PAIRS, splits=THIRDS, batch_size=3)
    assert len(read_manifest(parts).splits["train"].shards) > 3
    for split in THIRDS:
        assert stored(parts, split) == stored(whole, split)


def test_slices_never_part_a_prompt_from_its_answer(monkeypatch):
    monkeypatch.setattr(partitions, "ENCODE_BYTES", 40)
    texts = pa.array([text for pair in PAIRS[:50] for text in pair])
    for size in (1, 4, 100):
        found = list(slices(texts, size, 2))
        assert pa.concat_arrays(found).equals(texts)
        assert all(len(part) % 2 == 0 and 0 < len(part) <= 2 * size for part in found)


def test_an_empty_split_is_opened_by_datasets(tmp_path):
    import datasets

    folder = pair_dataset(tmp_path, PAIRS[:20], splits={"train": 1, "validation": 0, "test": 0})
    assert len(datasets.load_from_disk(str(folder))["test"]) == 0
    assert stored(folder, "test") == []


def test_only_what_decides_the_pairs_changes_their_key(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", as_rows(PAIRS))

    def key(**source):
        return build(pairs_config(path, source=source), tmp_path / str(random.random()))[0].key

    keys = [key(), key(template="{role}: {content}\n"), key(min_characters=5)]
    assert len(set(keys)) == 3
    assert key(column="ignored", template=FilesSource().template) != keys[0]


def test_a_text_dataset_knows_nothing_of_pairs(tmp_path):
    texts = files_config(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    manifest, folder = build(texts, tmp_path)
    assert "pairs" not in (folder / "manifest.json").read_text()
    for shard in folder.rglob("*.arrow"):
        assert pa.ipc.open_stream(shard.read_bytes()).schema.names == ["input_ids"]
    template = texts.model_copy(
        update={"source": texts.source.model_copy(update={"template": "{role}{content}"})}
    )
    assert build(template, tmp_path)[0].key == manifest.key
    with pytest.raises(DataError, match=r"arrow: has no prompts, the manifest says it has"):
        list(open_split(folder, "train").shards.prompts())


def test_nothing_left_names_the_file(tmp_path):
    with pytest.raises(DataError, match="no documents left: 2 of 2 are without a prompt or an ans"):
        pair_dataset(tmp_path, [("a", ""), ("b", "")])


def test_prompts_of_shards_in_a_store_are_those_of_the_folder(tmp_path, bucket, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 3000)
    local = pair_dataset(tmp_path, PAIRS, splits=THIRDS)
    elsewhere = without_shards(local, tmp_path / "elsewhere", bucket, ["train"])
    for split in THIRDS:
        assert stored(elsewhere, split) == stored(local, split)
    texts = build_texts(tmp_path / "texts")
    bare = without_shards(texts, tmp_path / "bare", bucket, ["train"])
    with pytest.raises(DataError, match=r"s3://.*: has no prompts, the manifest says it has"):
        list(open_split(bare, "train").shards.prompts())


def build_texts(folder):
    return build(files_config(write_parquet(folder / "a.parquet", make_texts(20))), folder)[1]


def test_a_dataset_of_pairs_in_a_store_is_the_local_one(tmp_path, bucket):
    local = pair_dataset(tmp_path, PAIRS, splits=THIRDS)
    machine = Machine(tmp_path / "machine", f"{bucket}/datasets")
    config = pairs_config(tmp_path / "pairs.jsonl", splits=THIRDS)
    assert machine.build(config).pairs
    staged = machine.stage(config)
    assert all_stored(staged) == all_stored(local)
