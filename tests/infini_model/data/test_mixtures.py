"""Datasets of named sources: each has its own partitions, all have one tokenizer."""

import numpy as np
import pytest
from builds import Machine
from corpora import build, make_pairs, make_texts, write_files, write_parquet, write_rows

from infini_model.config import DataConfig, FilesSource, PackingConfig
from infini_model.data.loading.stream import open_split
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import SPLITS
from infini_model.data.sources.listing import list_sources
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.runtime.errors import DataError

TEXTS, BODIES, PAIRS = (
    make_texts(40, longest=80),
    make_texts(30, seed=1, longest=80),
    make_pairs(60),
)
SPLIT_SIZES = {"train": 0.7, "validation": 0.2, "test": 0.1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Text files, a column of a table, and conversations."""
    folder = tmp_path_factory.mktemp("sources")
    write_files(folder / "texts", TEXTS)
    write_parquet(folder / "bodies.parquet", BODIES)
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in PAIRS
    ]
    write_rows(folder / "chats.jsonl", rows)
    return {
        "texts": FilesSource(paths=[str(folder / "texts" / "*.txt")]),
        "bodies": FilesSource(paths=[str(folder / "bodies.parquet")], column="text"),
        "chats": FilesSource(paths=[str(folder / "chats.jsonl")], pairs=True),
    }


def config_of(sources, *names, **fields):
    return DataConfig(sources={name: sources[name] for name in names}, splits=SPLIT_SIZES, **fields)


def decoded(folder, name):
    """The texts of a source, without what begins and ends them."""
    tokenizer, found = load_dataset_tokenizer(folder), []
    for split in SPLITS:
        stream = open_split(folder, split)
        shards = stream.sources[name]
        numbers = range(*stream.document_starts[[shards.start, shards.stop]])
        found += [tokenizer.decode(stream.document(n).tolist()) for n in numbers]
    return sorted(found)


@pytest.fixture(params=["folder", "store"])
def machine(request, tmp_path):
    if request.param == "folder":
        return Machine(tmp_path / "datasets", None)
    return Machine(tmp_path / "datasets", f"{request.getfixturevalue('bucket')}/datasets")


def test_one_source_more_or_another_name_tokenises_nothing_else(machine, sources):
    first = machine.build(config_of(sources, "texts", "bodies"))
    assert len(machine.made) == len(set(first.partitions)) > 1
    more = machine.build(config_of(sources, "chats", "texts", "bodies"))
    assert set(machine.made) == set(more.partitions) - set(first.partitions)
    assert len(machine.made) == 1
    renamed = machine.build(
        DataConfig(sources={"a": sources["bodies"], "b": sources["texts"]}, splits=SPLIT_SIZES)
    )
    single = machine.build(DataConfig(source=sources["texts"], splits=SPLIT_SIZES))
    assert not machine.made
    assert len({first.key, more.key, renamed.key, single.key}) == 4
    again = machine.build(config_of(sources, "bodies", "texts"))
    assert (again.key, machine.made) == (first.key, [])


def test_each_source_has_its_own_documents(sources, tmp_path):
    config = config_of(
        sources, "texts", "bodies", "chats", tokenizer={"spec": "train", "vocab_size": 300}
    )
    manifest, folder = build(config, tmp_path)
    assert decoded(folder, "texts") == sorted(TEXTS)
    assert decoded(folder, "bodies") == sorted(BODIES)
    assert len(decoded(folder, "chats")) == len(PAIRS)
    assert manifest.conversations == ["chats"]
    assert all(
        list(record.sources) == ["bodies", "chats", "texts"] for record in manifest.splits.values()
    )
    assert manifest.corpus.documents == len(TEXTS) + len(BODIES) + len(PAIRS)


def test_of_conversations_what_is_learned_is_marked_and_of_texts_all(sources, tmp_path):
    import datasets

    _, folder = build(config_of(sources, "texts", "chats"), tmp_path)
    windows = open_windows(folder, "train", PackingConfig(context_length=32), 16)
    for name, numbers in windows.sources.items():
        learnt = windows.gather(np.array(numbers)).learnt
        assert bool(learnt.all()) == (name == "texts")
        assert learnt.any()
    loaded = datasets.load_from_disk(str(folder))
    for split, rows in loaded.items():
        stream = open_split(folder, split)
        marks = rows["learnt"]
        assert len(rows) == stream.documents
        # The shards of texts have no such column.
        assert sum(each is None for each in marks) == stream.sizes(stream.sources["texts"])[1]
        for number, mark in enumerate(marks):
            expected = stream.learnt_of(number).tolist()
            assert mark == expected if mark is not None else all(expected)


def test_the_same_file_may_be_in_two_sources(sources, tmp_path):
    twice = {"one": sources["texts"], "two": sources["texts"]}
    _, folder = build(DataConfig(sources=twice, splits=SPLIT_SIZES), tmp_path)
    assert decoded(folder, "one") == decoded(folder, "two") == sorted(TEXTS)


def test_a_fault_is_named_by_its_source(sources, tmp_path):
    nowhere = FilesSource(paths=[str(tmp_path / "nothing" / "*.txt")])
    config = DataConfig(sources={"web": sources["texts"], "code": nowhere})
    with pytest.raises(DataError, match=r"^data\.sources\.code\.paths: .* matches no file"):
        list_sources(config, tmp_path)
    empty = write_files(tmp_path / "empty", ["", ""])
    config = DataConfig(sources={"a": sources["texts"], "b": FilesSource(paths=[f"{empty}/*"])})
    with pytest.raises(
        DataError, match=r"0000\.txt and 1 more: no documents left: 2 of 2 are empty, "
    ):
        build(config, tmp_path)
