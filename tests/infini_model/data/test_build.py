"""Shards depend only on content, are reused by content, and survive failures."""

import errno
import itertools
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from builds import in_a_fork, killed_in_an_access, verify_dataset, with_full_disk
from commands import leftovers
from corpora import build, files_config, make_texts, shard_bytes, write_files, write_parquet
from templates import BOS, with_bos
from tokenizers import Tokenizer as Reference

from infini_model.config import DataConfig, FilesSource, SplitsConfig
from infini_model.data import make_partition
from infini_model.data.build import build_dataset
from infini_model.data.loading import stream
from infini_model.data.loading.stream import count_duplicates, open_split
from infini_model.data.manifest import SPLITS, TokenizerRecord, read_manifest
from infini_model.data.partitions import CommonSpec, Partition, PartitionSpec
from infini_model.data.sources import text
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.sources.conversations import Conversations
from infini_model.data.sources.files import FileRange, SourceFile
from infini_model.data.sources.listing import list_sources
from infini_model.data.sources.rows import Reading
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.storage import content_key

THIRDS = {"train": 0.5, "validation": 0.25, "test": 0.25}


def large_texts(count=24, size=100_000):
    """Documents of a size that makes several partitions of a mebibyte."""
    texts = enumerate(make_texts(count))
    return [f"{number} {text} " * (size // len(text)) for number, text in texts]


@pytest.fixture
def small(tmp_path):
    """A configuration of 20 documents in a file, with a tokenizer of its own."""
    path = write_parquet(tmp_path / "a.parquet", make_texts(20))
    return files_config(path, tokenizer={"spec": "train", "vocab_size": 280}, workers=1)


def intact_shards(folder):
    """The shards of a dataset that is intact."""
    verify_dataset(folder)
    return shard_bytes(folder)


def documents_of(folder):
    streams = [open_split(folder, split) for split in SPLITS]
    return [each.document(index).tolist() for each in streams for index in range(each.documents)]


def partitions_of(output_dir):
    # A folder made anew may get the inode of the one that was removed.
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in (output_dir / "datasets" / ".partitions").glob("[0-9a-f]*")
    }


@pytest.mark.parametrize("template", ["bytes", None, "{} $A", "{} $A {}"], ids=str)
def test_every_document_is_there_once_as_tokenizers_encodes_it_with_end_of_text(tmp_path, template):
    import datasets

    texts = [*make_texts(100), BOS, f"{BOS} spelt out", "the <|end_of_text|> inside", "\n", "\n"]
    definition = train_tokenizer([texts], 300).text
    if template not in (None, "bytes"):
        definition = with_bos(definition, template=template)
    (tmp_path / "tokenizer.json").write_text(definition)
    config = files_config(
        write_parquet(tmp_path / "a.parquet", [*texts, *[""] * 1000]),
        tokenizer={"spec": template if template == "bytes" else str(tmp_path)},
        splits=THIRDS,
        workers=2,
    )
    manifest, folder = build(config, tmp_path)
    reference = Reference.from_str(definition)
    # What a template puts behind a text is left out: the end-of-text token ends documents.
    behind = bool(template and template.endswith("{}"))
    bodies = [encoding.ids for encoding in reference.encode_batch(texts)]
    bodies = [ids[: len(ids) - behind] for ids in bodies]
    if template == "bytes":
        bodies = [[*text.encode()] for text in texts]
    expected = [[*ids, manifest.tokenizer.eos_token_id] for ids in bodies]
    found = documents_of(folder)
    assert sorted(found) == sorted(expected)
    assert (manifest.corpus.documents, manifest.corpus.skipped) == (len(texts), 1000)
    assert manifest.tokens == sum(map(len, expected))
    tokenizer = load_dataset_tokenizer(folder)
    decoded = [tokenizer.decode(document) for document in found]
    assert sorted(decoded) == sorted(texts)
    hashes = [each for split in SPLITS for each in open_split(folder, split).content_hashes()]
    digests = (sha256(document.encode()).digest() for document in decoded)
    assert np.concatenate(hashes).tolist() == [int.from_bytes(each[:8]) for each in digests]
    loaded = datasets.load_from_disk(str(folder))
    assert [row["input_ids"] for split in SPLITS for row in loaded[split]] == found
    for split, part in loaded.items():
        dtype = open_split(folder, split).document(0).dtype.name
        assert part.features["input_ids"].feature.dtype == dtype
        (shard,) = open_split(folder, split).content_hashes()
        assert part["content_hash"][:] == shard.tolist()
        assert len(part) == len(datasets.load_from_disk(str(folder / split)))
    assert (tmp_path / "datasets" / "latest").resolve() == folder


def test_of_too_many_documents_the_duplicates_are_estimated(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", make_texts(600, longest=5) * 3)
    folder = build(files_config(path, splits=THIRDS), tmp_path)[1]
    streams = [open_split(folder, split) for split in SPLITS]
    assert count_duplicates(streams) == (1200, False)
    monkeypatch.setattr(stream, "MOST_HASHES", 500)
    found, is_estimate = count_duplicates(streams)
    assert is_estimate
    assert found == pytest.approx(1200, rel=0.2)


def test_the_shards_do_not_depend_on_how_they_were_made(tmp_path):
    texts = large_texts()
    raw = write_files(tmp_path / "raw", texts)
    random.Random(0).shuffle(texts)
    renamed = write_files(tmp_path / "renamed", texts)
    made = []
    for source, fields in (
        (raw, {"workers": 1}),
        (raw, {"workers": 2}),
        (renamed, {"workers": 1}),
    ):
        config = files_config(source / "*.txt", splits=THIRDS, partition_megabytes=1, **fields)
        manifest, folder = build(config, tmp_path / str(len(made)))
        made.append((manifest.key, intact_shards(folder)))
    assert len(made[0][1]) > 3
    assert made[0] == made[1] == made[2]


FILE = SourceFile(address="/a/b.txt", bytes=3, fingerprint="sha256:ab", version="1")
RECORD = TokenizerRecord(
    spec="bytes", vocab_size=256, eos_token_id=255, fingerprint="f", dtype="uint8"
)
EVERY = {"reading": Reading(), "tokenizer": RECORD, "splits": SplitsConfig()}


def spec_of(*ranges, **changes):
    common = CommonSpec(**EVERY | changes)
    ((key, part),) = common.keyed([Partition(ranges, 9)])
    return PartitionSpec(key=key, ranges=part.ranges, bytes=part.bytes, **common._asdict())


def test_a_key_depends_only_on_what_decides_the_content_and_never_changes():
    part = FileRange(file=FILE, format="text")
    other = part.model_copy(update={"start": 5})
    spec = spec_of(part, other)
    moved = FILE.model_copy(update={"address": "s3://c/d.md", "version": "2"})
    same = (each.model_copy(update={"file": moved}) for each in (other, part))
    file = FILE.model_copy(update={"fingerprint": "x"})
    places = ({"start": 6}, {"start": 5, "stop": 6}, {"file": file}, {"format": "jsonl"})
    ranges = [other.model_copy(update=each) for each in places]
    chat = Conversations(ChatTemplate("{{ messages }}"))
    chats = chat, replace(chat, learn="last"), replace(chat, columns=("q", "a"))
    chats += (Conversations(ChatTemplate("{{ messages }}:")),)
    readings = (
        *({"column": "body"}, {"errors": "skip"}, {"min_characters": 5}, {"separator": "x"}),
        *({"conversations": each} for each in chats),
    )
    records = ({"fingerprint": "g"}, {"eos_token_id": 0}, {"bos_token_id": 0})
    changes = [{"splits": SplitsConfig(**THIRDS)}]
    changes += [{"reading": Reading(**each)} for each in readings]
    changes += [{"tokenizer": RECORD.model_copy(update=each)} for each in records]
    different = [spec_of(part), *(spec_of(part, each) for each in ranges)]
    different += [spec_of(part, other, **each) for each in changes]
    assert len({spec.key, *(each.key for each in different)}) == len(different) + 1
    assert spec_of(*same).key == spec.key
    # Datasets and partitions on disk are found by these.
    spec = spec_of(part, splits=SplitsConfig(**THIRDS))
    assert spec.key == "7e84fb46fddfa39589df961f6810fb4f"
    assert "bos_token_id" not in spec.tokenizer.model_dump()
    whole = "ee9fad3730a2b3d0368e064d05f4b981e7cfac3cdc6fd1afa56e893fe024a696"
    assert content_key([spec.key]) == whole


def test_one_file_more_makes_its_own_partition_and_renaming_or_moving_none(tmp_path, several):
    output = tmp_path / "output"
    _, folder = build(several, output)
    before, inode = partitions_of(output), folder.stat().st_ino
    assert len(before) > 3
    (tmp_path / "raw").rename(tmp_path / "renamed")
    renamed = files_config(tmp_path / "renamed" / "*.txt", partition_megabytes=1)
    output = output.rename(tmp_path / "moved")
    folder = output / "datasets" / folder.name
    assert build(renamed, output)[1] == folder
    assert folder.stat().st_ino == inode
    assert partitions_of(output) == before
    (tmp_path / "renamed" / "new.txt").write_text("one more document")
    manifest, larger = build(renamed, output)
    after = partitions_of(output)
    assert before.items() < after.items()
    assert len(after) == len(before) + 1
    assert manifest.corpus.documents == read_manifest(folder).corpus.documents + 1
    assert verify_dataset(folder)
    assert verify_dataset(larger)


def test_no_text_is_read_for_what_stands(tmp_path, small):
    listing = list_sources(small, tmp_path)
    first = build_dataset(listing, small, tmp_path / "datasets")
    (tmp_path / "a.parquet").unlink()
    assert build_dataset(listing, small, tmp_path / "datasets") == first
    assert first.key == content_key(first.partitions)


def test_a_torn_partition_is_made_again_alone(tmp_path, several):
    manifest, folder = build(several, tmp_path)
    whole = intact_shards(folder)
    torn = tmp_path / "datasets" / ".partitions" / manifest.partitions[1]
    for tear in (
        lambda: (torn / "train-0.arrow").unlink(),
        lambda: (torn / "partition.json").unlink(),
        lambda: (torn / "partition.json").write_text('{"documents": 3'),
        lambda: shutil.rmtree(torn),
    ):
        stats = partitions_of(tmp_path)
        tear()
        shutil.rmtree(folder)
        build(several, tmp_path)
        assert intact_shards(folder) == whole
        anew = {key for key, stat in partitions_of(tmp_path).items() if stats[key] != stat}
        assert anew == {manifest.partitions[1]}


def test_a_missing_tokenizer_or_a_broken_manifest_is_made_again(tmp_path, small):
    _, folder = build(small, tmp_path)
    whole = intact_shards(folder)
    for harm, complaint in (
        (lambda: (folder / "tokenizer.json").unlink(), r"tokenizer\.json: is missing"),
        (lambda: (folder / "manifest.json").write_text("{"), r"manifest\.json: is damaged"),
    ):
        harm()
        with pytest.raises(DataError, match=complaint):
            verify_dataset(folder)
        build(small, tmp_path)
        assert intact_shards(folder) == whole


def test_shards_that_cannot_be_linked_are_copied(tmp_path, monkeypatch, small):
    def link(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))

    _, folder = build(small, tmp_path)
    whole = intact_shards(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(os, "link", link)
    build(small, tmp_path)
    assert intact_shards(folder) == whole


def test_a_build_killed_at_any_moment_gives_the_same_result(tmp_path, small):
    whole = intact_shards(build(small, tmp_path / "whole")[1])
    output_dir = tmp_path / "killed"
    for moment in (10, 16, 24, 42, 48, 66, 99):
        shutil.rmtree(output_dir, ignore_errors=True)
        with pytest.raises(BrokenProcessPool):
            in_a_fork(killed_in_an_access, small, output_dir, moment)
        assert intact_shards(build(small, output_dir)[1]) == whole
        assert not leftovers(output_dir)


def test_two_builds_of_one_key_do_the_work_once(tmp_path, several, caplog):
    """Here threads: the lock does not tell them apart from processes."""
    caplog.set_level("INFO")
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build(several, tmp_path)[0].key, range(2)))
    assert built[0] == built[1]
    assert caplog.text.count(" to make, ") == 1
    assert caplog.text.count(": reused") == 1


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, several):
    for limit in (200_000, 300_000):
        with pytest.raises(UserError, match="cannot be written") as full:
            in_a_fork(with_full_disk, several, tmp_path, limit)
        assert "\n" not in str(full.value)
        assert not leftovers(tmp_path)
        assert not list((tmp_path / "datasets").glob("corpus-*"))
    assert verify_dataset(build(several, tmp_path)[1])


def test_a_split_without_documents_is_told_with_what_gives_it_some(tmp_path, caplog):
    splits = {"train": 0.5, "validation": 0.5, "test": 0}
    path = write_parquet(tmp_path / "a.parquet", make_texts(1))
    manifest, _ = build(files_config(path, splits=splits), tmp_path)
    (empty,) = [each for each in ("train", "validation") if not manifest.splits[each].documents]
    (told,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert told.endswith(f"raise data.splits.{empty}")


def test_documents_that_are_left_out_are_counted_and_the_first_named(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(text, "_left_out", itertools.count())
    contents = [b"caf\xe9", b"\0", b"", b"text", b"more text", b"\xff", b"\xe9"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    source = FilesSource(paths=[str(tmp_path / "*.txt")], errors="skip")
    build(DataConfig(source=source), tmp_path)
    assert "5 documents are left out, as empty, without an answer, " in caplog.text
    told = [each for each in caplog.messages if each.endswith("is left out, as it is not UTF-8")]
    assert len({each.split(":")[0] for each in told}) == 3


def test_a_separator_that_occurs_nowhere_is_told_also_of_a_dataset_that_stands(tmp_path, caplog):
    write_files(tmp_path, ["one", "two\n\n", ""])
    for separator, is_told in (("\n\n", False), ("\n---\n", True), ("\n---\n", True)):
        caplog.clear()
        source = FilesSource(paths=[str(tmp_path / "*.txt")], separator=separator)
        build(DataConfig(source=source), tmp_path)
        told = f"{separator!r} occurs in none of 3 files; each is one document, such as {tmp_path}"
        assert (told in caplog.text) == is_told


@pytest.mark.parametrize("spec", ["bytes", "train"])
def test_documents_larger_than_batch_shard_and_partition_stay_whole(tmp_path, monkeypatch, spec):
    monkeypatch.setattr(make_partition, "SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(make_partition, "ENCODE_BYTES", 1 << 18)
    texts = [*large_texts(40, 40_000), "naïve 🦊 and 日本 once more\n" * 50_000]
    config = files_config(
        write_parquet(tmp_path / "a.parquet", texts),
        splits={"train": 1, "validation": 0, "test": 0},
        partition_megabytes=1,
        tokenizer={"spec": spec, "vocab_size": 300},
    )
    manifest, folder = build(config, tmp_path)
    assert len(manifest.splits["train"].shards) > 1
    tokenizer = load_dataset_tokenizer(folder)
    assert sorted(map(tokenizer.decode, documents_of(folder))) == sorted(texts)


def test_equal_files_are_documents_of_their_own(tmp_path):
    texts = large_texts(20)
    for name in ("a.parquet", "b.parquet"):
        write_parquet(tmp_path / name, texts, row_group_size=5)
    config = files_config(tmp_path / "*.parquet", partition_megabytes=1)
    manifest, _ = build(config, tmp_path)
    assert len(manifest.partitions) == 2 * len(set(manifest.partitions)) > 2
    assert manifest.corpus.documents == 2 * len(texts)
