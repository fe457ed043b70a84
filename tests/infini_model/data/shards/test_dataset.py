"""Shards depend only on content, are reused by content, and survive failures."""

import errno
import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from corpora import build, files_config, make_texts, write_files, write_parquet
from hypothesis import given
from hypothesis import strategies as st
from templates import BOS, with_bos
from tokenizers import Tokenizer as Reference

from infini_model.config import SplitsConfig
from infini_model.data.manifest import (
    SPLITS,
    TokenizerRecord,
    latest_dataset,
    read_manifest,
    write_record,
)
from infini_model.data.shards import partitions, writing
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.shards.folder import dataset_key
from infini_model.data.shards.layout import Partition
from infini_model.data.shards.partitions import Recipe, slices
from infini_model.data.shards.stream import open_split
from infini_model.data.shards.writing import ShardWriter, as_rows
from infini_model.data.sources.download import download
from infini_model.data.sources.files import FileRange, Listing, SourceFile
from infini_model.data.sources.formats import Reading
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Ragged
from infini_model.data.verification import verify_dataset
from infini_model.runtime.errors import DataError, UserError

THIRDS = {"train": 0.5, "validation": 0.25, "test": 0.25}

BUILD = """
import json, logging, os, signal, sys
from pathlib import Path
from infini_model.config import DataConfig
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.runtime.errors import UserError

logging.basicConfig(level=logging.INFO)
config = DataConfig.model_validate_json(sys.argv[1])
output_dir = Path(sys.argv[2])
"""
DO = """
try:
    print(build_dataset(download(config, output_dir), config, output_dir).key)
except UserError as error:
    print(error)
    sys.exit(2)
"""


def large_texts(count=24, size=100_000):
    """Documents of a size that makes several partitions of a mebibyte."""
    return [
        f"{number} {text} " * (size // len(text)) for number, text in enumerate(make_texts(count))
    ]


def run(script, config, output_dir, *arguments):
    return subprocess.run(
        [sys.executable, "-c", BUILD + script + DO, config.model_dump_json(), str(output_dir)]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
    )


def shard_bytes(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.arrow"))}


def stream_of(folder, split):
    stream = open_split(folder, split)
    return [stream.document(index).tolist() for index in range(stream.documents)]


def leftovers(output_dir):
    return [*output_dir.rglob(".tmp-*")]


def partitions_of(output_dir):
    # A folder made anew may get the inode of the one that was removed.
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in (output_dir / "datasets" / ".partitions").glob("[0-9a-f]*")
    }


@pytest.mark.parametrize("spec", ["bytes", "train"])
def test_load_from_disk_returns_every_document_once(tmp_path, spec):
    import datasets

    texts = [*make_texts(200), "twice", "twice"]
    config = files_config(
        write_parquet(tmp_path / "a.parquet", texts),
        tokenizer={"spec": spec, "vocab_size": 300},
        splits=THIRDS,
    )
    manifest, folder = build(config, tmp_path)
    loaded = datasets.load_from_disk(str(folder))
    tokenizer = load_dataset_tokenizer(folder)
    decoded = []
    for split in SPLITS:
        rows = loaded[split].with_format("numpy")
        stream = open_split(folder, split)
        assert rows.features["input_ids"].feature.dtype == stream.document(0).dtype.name
        assert len(rows) == stream.documents == manifest.splits[split].documents > 0
        for index, row in enumerate(rows):
            assert np.array_equal(row["input_ids"], stream.document(index))
            assert row["input_ids"][-1] == tokenizer.eos_token_id
            decoded.append(tokenizer.decode(row["input_ids"]))
        alone = datasets.load_from_disk(str(folder / split))
        assert len(alone) == len(rows)
    assert sorted(decoded) == sorted(texts)
    assert manifest.documents == len(texts)
    assert latest_dataset(tmp_path / "datasets") == folder


@pytest.mark.parametrize("template", [None, "{} $A", "{} $A {}"], ids=str)
def test_documents_are_those_of_tokenizers_with_end_of_text(tmp_path, template):
    texts = [*make_texts(100), BOS, f"{BOS} spelt out", "the <|end_of_text|> inside", "\n"]
    definition = train_tokenizer([texts], 300).text
    if template is not None:
        definition = with_bos(definition, template=template)
    (tmp_path / "tokenizer.json").write_text(definition)
    reference = Reference.from_str(definition)
    source = write_parquet(tmp_path / "a.parquet", texts)
    config = files_config(
        source, tokenizer={"spec": str(tmp_path)}, splits=THIRDS, batch_size=7, workers=2
    )
    manifest, folder = build(config, tmp_path)
    assert manifest.tokenizer.bos_token_id == reference.token_to_id(BOS)
    # What a template puts behind a text is left out: the end-of-text token ends documents.
    behind = bool(template and template.endswith("{}"))
    bodies = [encoding.ids for encoding in reference.encode_batch(texts)]
    expected = [[*ids[: len(ids) - behind], manifest.tokenizer.eos_token_id] for ids in bodies]
    found = [ids for split in SPLITS for ids in stream_of(folder, split)]
    assert sorted(found) == sorted(expected)
    assert manifest.tokens == sum(map(len, expected))
    tokenizer = load_dataset_tokenizer(folder)
    assert sorted(map(tokenizer.decode, found)) == sorted(texts)


def test_a_split_depends_only_on_the_document(tmp_path):
    texts = make_texts(100)
    where = {}
    for part in (texts, texts[:30]):
        config = files_config(write_parquet(tmp_path / "a.parquet", part), splits=THIRDS)
        _, folder = build(config, tmp_path)
        for split in SPLITS:
            stream = open_split(folder, split)
            for index in range(stream.documents):
                text = ByteTokenizer().decode(stream.document(index))
                assert where.setdefault(text, split) == split


def test_the_stream_does_not_depend_on_how_it_was_made(tmp_path):
    texts = large_texts()
    raw = write_files(tmp_path / "raw", texts)
    shuffled = texts.copy()
    random.Random(0).shuffle(shuffled)
    renamed = write_files(tmp_path / "renamed", shuffled)
    made = []
    for number, (source, fields) in enumerate(
        [
            (raw / "*.txt", {"workers": 1}),
            (raw / "*.txt", {"workers": 2}),
            (renamed / "*.txt", {"workers": 1, "batch_size": 3}),
        ]
    ):
        config = files_config(source, splits=THIRDS, partition_megabytes=1, **fields)
        made.append(build(config, tmp_path / str(number)))
    manifests, folders = zip(*made, strict=True)
    assert len({manifest.key for manifest in manifests}) == 1
    assert len(shard_bytes(folders[0])) > 3
    assert shard_bytes(folders[0]) == shard_bytes(folders[1]) == shard_bytes(folders[2])


def specs_of(*ranges, tokenizer=None, splits=None, reading=None, batch_size=9):
    record = tokenizer or TokenizerRecord(
        spec="bytes", vocab_size=256, eos_token_id=255, fingerprint="f", dtype="uint8"
    )
    recipe = Recipe(reading or Reading(), record, "kept", splits or SplitsConfig(), batch_size)
    return [recipe.spec(*keyed) for keyed in recipe.keyed([Partition(ranges, 9)])]


def test_a_key_depends_only_on_what_decides_the_content():
    file = SourceFile(address="/a/b.txt", bytes=3, fingerprint="sha256:ab", version="1")
    part, other = FileRange(file=file), FileRange(file=file, start=5)
    (spec,) = specs_of(part, other)
    moved = file.model_copy(update={"address": "s3://c/d.md", "version": "2"})
    same = [FileRange(file=moved, start=5), FileRange(file=moved)]
    assert specs_of(*same, batch_size=1)[0].key == spec.key
    record = spec.tokenizer
    different = [
        specs_of(part),
        specs_of(part, part),
        specs_of(part, FileRange(file=file, start=6)),
        specs_of(part, FileRange(file=file, start=5, stop=6)),
        specs_of(part, FileRange(file=file, start=5, rows=6)),
        specs_of(part, FileRange(file=file.model_copy(update={"fingerprint": "x"}), start=5)),
        specs_of(part, FileRange(file=file.model_copy(update={"address": "a.jsonl"}), start=5)),
        specs_of(part, other, splits=SplitsConfig(**THIRDS)),
        specs_of(part, other, reading=Reading(column="body")),
        specs_of(part, other, reading=Reading(errors="skip")),
        specs_of(part, other, reading=Reading(min_characters=5)),
        specs_of(part, other, reading=Reading(separator="x")),
        specs_of(part, other, tokenizer=record.model_copy(update={"fingerprint": "g"})),
        specs_of(part, other, tokenizer=record.model_copy(update={"eos_token_id": 0})),
        specs_of(part, other, tokenizer=record.model_copy(update={"bos_token_id": 0})),
    ]
    keys = {found.key for (found,) in different}
    assert len(keys) == len(different)
    assert spec.key not in keys


def test_keys_of_existing_folders_do_not_change():
    """Datasets and partitions on disk are found by these keys."""
    file = SourceFile(address="/a/b.txt", bytes=3, fingerprint="sha256:ab", version="1")
    (spec,) = specs_of(FileRange(file=file), splits=SplitsConfig(**THIRDS))
    assert spec.key == "9b9bb194d314220763c53b44f43fa8d3"
    assert "bos_token_id" not in spec.tokenizer.model_dump()
    assert dataset_key([spec.key]) == (
        "a8538e4f06572d37fc3f50a95910c16adaee55802910c2c20ef6a3778aec9151"
    )


def test_one_file_more_makes_its_own_partition_and_renaming_none(tmp_path):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*.txt", partition_megabytes=1)
    _, folder = build(config, tmp_path)
    before = partitions_of(tmp_path)
    assert len(before) > 3
    raw.rename(tmp_path / "renamed")
    config = files_config(tmp_path / "renamed" / "*.txt", partition_megabytes=1)
    inode = folder.stat().st_ino
    assert build(config, tmp_path)[1] == folder
    assert folder.stat().st_ino == inode
    (tmp_path / "renamed" / "new.txt").write_text("one more document")
    manifest, larger = build(config, tmp_path)
    assert larger != folder
    after = partitions_of(tmp_path)
    assert before.items() < after.items()
    assert len(after) == len(before) + 1
    assert manifest.documents == read_manifest(folder).documents + 1
    assert verify_dataset(folder)
    assert verify_dataset(larger)
    (tmp_path / "renamed" / "new.txt").unlink()
    assert build(config, tmp_path)[1] == folder
    assert partitions_of(tmp_path) == after


def test_a_moved_output_folder_is_reused(tmp_path):
    config = files_config(write_files(tmp_path / "raw", ["a", "b"]) / "*")
    _, folder = build(config, tmp_path / "output")
    before = partitions_of(tmp_path / "output")
    (tmp_path / "output").rename(tmp_path / "moved")
    _, found = build(config, tmp_path / "moved")
    assert found == tmp_path / "moved" / "datasets" / folder.name
    assert partitions_of(tmp_path / "moved") == before


def test_no_text_is_read_for_what_stands(tmp_path):
    raw = write_files(tmp_path / "raw", make_texts(5))
    config = files_config(raw / "*.txt")
    listing = download(config, tmp_path)
    first = build_dataset(listing, config, tmp_path)
    shutil.rmtree(raw)
    assert build_dataset(listing, config, tmp_path) == first
    with pytest.raises(DataError, match=r"000\d\.txt: does not exist"):
        build_dataset(listing, config, tmp_path / "elsewhere")
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("change", ["rewritten", "removed", "replaced"])
def test_a_file_that_changes_after_it_was_listed_is_named(tmp_path, change):
    raw = write_files(tmp_path / "raw", make_texts(5))
    config = files_config(raw / "*.txt")
    listing = download(config, tmp_path)
    path = raw / "0003.txt"
    size = path.stat().st_size
    if change == "replaced":
        (raw / "other").write_text("x" * size)
        (raw / "other").rename(path)
    else:
        path.unlink()
    if change == "rewritten":
        path.write_text("y" * size)
    complaint = "does not exist" if change == "removed" else "changed while it was read; run again"
    with pytest.raises(DataError, match=rf"0003\.txt: {complaint}"):
        build_dataset(listing, config, tmp_path)
    assert not partitions_of(tmp_path)
    assert not leftovers(tmp_path)
    if change == "removed":
        path.write_text("back")
    assert build(config, tmp_path)[0].documents == 5


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, 100)])
def test_only_a_damaged_shard_is_named_and_made_again(tmp_path, harm):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    manifest, folder = build(config, tmp_path)
    whole, stats = shard_bytes(folder), partitions_of(tmp_path)
    shard = manifest.splits["train"].shards[2]
    harmed = folder / "train" / shard.file
    harm(harmed)
    with pytest.raises(DataError, match=rf"^{harmed}: (is missing|is damaged|has 100 bytes)"):
        verify_dataset(folder)
    build(config, tmp_path)
    assert shard_bytes(verify_dataset_folder(folder)) == whole
    remade = {key for key, stat in partitions_of(tmp_path).items() if stats[key] != stat}
    # A missing link is linked again; damage to the file also damages the partition.
    assert remade == (set() if harm is Path.unlink else {shard.path.split("/")[0]})
    assert not leftovers(tmp_path)


def verify_dataset_folder(folder):
    verify_dataset(folder)
    return folder


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_shards_that_cannot_be_linked_are_copied(tmp_path, monkeypatch, number):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    _, folder = build(config, tmp_path)
    whole = shard_bytes(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(os, "link", fails(number))
    build(config, tmp_path)
    assert shard_bytes(verify_dataset_folder(folder)) == whole
    assert all(shard.stat().st_nlink == 1 for shard in folder.glob("*/data-*.arrow"))


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "Errno")],
)
def test_a_link_that_fails_otherwise_is_reported(tmp_path, monkeypatch, number, error):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    monkeypatch.setattr(os, "link", fails(number))
    with pytest.raises((UserError, OSError), match=error):
        build(config, tmp_path)
    assert not leftovers(tmp_path)


def fails(number):
    def link(source, target):
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    return link


def test_a_missing_partition_and_a_broken_manifest_are_made_again(tmp_path):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    _, folder = build(config, tmp_path)
    whole = shard_bytes(folder)
    shutil.rmtree(tmp_path / "datasets" / ".partitions")
    assert verify_dataset(folder)
    for text in ("{broken", "{}"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(DataError, match=r"manifest\.json: is damaged"):
            read_manifest(folder)
        build(config, tmp_path)
        assert shard_bytes(verify_dataset_folder(folder)) == whole


@pytest.mark.parametrize("lost", ["shard", "record", "broken record", "folder"])
def test_a_torn_partition_is_made_again_alone(tmp_path, lost):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    manifest, folder = build(config, tmp_path)
    whole, stats = shard_bytes(folder), partitions_of(tmp_path)
    torn = tmp_path / "datasets" / ".partitions" / manifest.partitions[1]
    if lost == "shard":
        (torn / "train-0.arrow").unlink()
    elif lost == "record":
        (torn / "partition.json").unlink()
    elif lost == "broken record":
        (torn / "partition.json").write_text('{"documents": 3')
    else:
        shutil.rmtree(torn)
    shutil.rmtree(folder)
    build(config, tmp_path)
    assert shard_bytes(verify_dataset_folder(folder)) == whole
    remade = {key for key, stat in partitions_of(tmp_path).items() if stats[key] != stat}
    assert remade == {torn.name}


def test_a_missing_metadata_file_is_made_again(tmp_path):
    config = files_config(
        write_parquet(tmp_path / "a.parquet", make_texts(20)),
        tokenizer={"spec": "train", "vocab_size": 280},
    )
    _, folder = build(config, tmp_path)
    for name in ("tokenizer.json", "test/state.json"):
        (folder / name).unlink()
        with pytest.raises(DataError, match=rf"{name}: is missing"):
            verify_dataset(folder)
        build(config, tmp_path)
        verify_dataset(folder)


def test_folders_that_are_not_datasets_are_named(tmp_path):
    with pytest.raises(DataError, match="gone: is not a dataset folder"):
        verify_dataset(tmp_path / "gone")
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        verify_dataset(tmp_path)
    with pytest.raises(DataError, match="there is no finished dataset yet"):
        latest_dataset(tmp_path)
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(20)))
    _, folder = build(config, tmp_path)
    tree = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(tree | {"format_version": 99}))
    with pytest.raises(DataError, match="has format version 99"):
        read_manifest(folder)
    shard = folder / "train" / tree["splits"]["train"]["shards"][0]["file"]
    (folder / "manifest.json").write_text(json.dumps(tree))
    os.truncate(shard, 10)
    with pytest.raises(DataError, match=rf"{shard.name}: has 10 bytes"):
        open_split(folder, "train")
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name}: is missing"):
        open_split(folder, "train")


def test_the_manifest_matches_the_files(tmp_path):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(50)), splits=THIRDS)
    manifest, folder = build(config, tmp_path)
    assert read_manifest(folder) == manifest
    assert manifest.partitions == sorted(manifest.partitions)
    keys = json.dumps(manifest.partitions)
    assert hashlib.sha256(keys.encode()).hexdigest() == manifest.key
    assert manifest.tokens == manifest.corpus.bytes + manifest.documents
    for name, shard in manifest.files():
        data = (folder / name).read_bytes()
        assert len(data) == shard.bytes
        assert hashlib.sha256(data).hexdigest() == shard.sha256
    assert str(tmp_path) not in (folder / "manifest.json").read_text()


def test_a_million_empty_documents_and_one_of_one_byte(tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", [*[""] * 1_000_000, "x", "\0"])
    manifest, _ = build(files_config(raw), tmp_path)
    assert (manifest.documents, manifest.corpus.skipped) == (2, 1_000_000)
    assert manifest.tokens == 4


@pytest.mark.parametrize("spec", ["bytes", "tokenizer.json"])
def test_a_document_larger_than_a_partition_stays_whole(tmp_path, spec):
    (tmp_path / "large.txt").write_text("naïve 🦊 and 日本 once more\n" * 300_000)
    train_tokenizer([make_texts(20)], 300).save(tmp_path)
    write_files(tmp_path / "small", make_texts(20))
    config = files_config(
        tmp_path / "*.txt",
        tmp_path / "small" / "*",
        partition_megabytes=1,
        tokenizer={"spec": "bytes" if spec == "bytes" else str(tmp_path / spec)},
    )
    manifest, folder = build(config, tmp_path)
    assert manifest.documents == 21
    tokenizer = load_dataset_tokenizer(folder)
    streams = [open_split(folder, split) for split in SPLITS]
    sizes = {
        len(tokenizer.decode(stream.document(index)).encode())
        for stream in streams
        for index in range(stream.documents)
    }
    assert max(sizes) == (tmp_path / "large.txt").stat().st_size > 9e6


# Kills the process before its n-th access to the output folder.
KILL = """
import itertools
moments = itertools.count()
def die(event, arguments):
    touches = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.symlink", "os.rmdir")
    if event in touches and str(arguments[0]).startswith(sys.argv[2]):
        if next(moments) == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(die)
"""


def test_a_build_killed_at_any_moment_gives_the_same_result(tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", make_texts(30))
    config = files_config(raw, tokenizer={"spec": "train", "vocab_size": 280}, workers=1)
    _, folder = build(config, tmp_path / "whole")
    whole = shard_bytes(folder)
    output_dir = tmp_path / "killed"
    killed = 0
    for moment in (10, 16, 24, 42, 48, 55, 66, 79, 99):
        shutil.rmtree(output_dir, ignore_errors=True)
        killed += run(KILL, config, output_dir, moment).returncode == -signal.SIGKILL
        _, again = build(config, output_dir)
        assert shard_bytes(verify_dataset_folder(again)) == whole
        assert not leftovers(output_dir)
    assert killed == 9


def test_what_a_killed_build_finished_is_kept(tmp_path):
    raw = write_files(tmp_path / "raw", large_texts(60))
    config = files_config(raw / "*", partition_megabytes=1, workers=2)
    script = """
def die(done, total):
    if done > total * 0.8:
        os.kill(os.getpid(), signal.SIGKILL)
build_whole = build_dataset
build_dataset = lambda *arguments: build_whole(*arguments, progress=die)
"""
    killed = run(script, config, tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = partitions_of(tmp_path / "killed")
    assert len(kept) > 0
    _, folder = build(config, tmp_path / "killed")
    assert kept.items() < partitions_of(tmp_path / "killed").items()
    _, expected = build(config.model_copy(update={"workers": 1}), tmp_path / "whole")
    assert shard_bytes(folder) == shard_bytes(expected)
    assert not leftovers(tmp_path)


def test_two_builds_of_one_key_do_the_work_once(tmp_path):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD + DO, config.model_dump_json(), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ended = [builder.communicate() for builder in builders]
    keys = {out for out, _ in ended}
    logs = "".join(log for _, log in ended)
    assert len(keys) == 1
    assert logs.count(" to make, ") == 1, logs
    assert logs.count(": reused") == 1, logs


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*", partition_megabytes=1, workers=2)
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"

    def fill(limit):
        full = run(script.format(limit), config, tmp_path)
        assert full.returncode == 2, full.stderr
        assert "cannot be written" in full.stdout
        assert full.stdout.count("\n") == 1
        assert not leftovers(tmp_path)
        assert not list((tmp_path / "datasets").glob("corpus-*"))

    fill(200_000)
    fill(300_000)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert verify_dataset(build(config, tmp_path)[1])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(3)))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out"):
        build(config, tmp_path / "out")


def test_an_error_in_a_worker_keeps_its_type_and_stops_the_others(tmp_path):
    texts = large_texts()
    raw = write_files(tmp_path / "raw", texts)
    config = files_config(raw / "*", partition_megabytes=1, workers=2)
    (raw / "0007.txt").write_bytes(b"\xe9" * len(texts[7]))
    with pytest.raises(DataError, match=r"0007\.txt: is not UTF-8"):
        build(config, tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]
    assert not leftovers(tmp_path)
    kept = partitions_of(tmp_path)
    (raw / "0007.txt").write_text(texts[7])
    build(config, tmp_path)
    assert kept.items() <= partitions_of(tmp_path).items()


def test_a_large_partition_has_several_shards_and_flat_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(partitions, "ENCODE_BYTES", 1 << 18)
    texts = large_texts(64)
    path = tmp_path / "a.parquet"
    write_parquet(path, texts)
    manifest, folder = build(files_config(path, splits=THIRDS), tmp_path)
    assert len(manifest.partitions) == 1
    assert [len(split.shards) > 1 for split in manifest.splits.values()] == [True] * 3
    assert all(shard.tokens <= 1 << 20 for _, shard in manifest.files())
    found = [
        ByteTokenizer().decode(stream.document(index))
        for stream in (open_split(folder, split) for split in SPLITS)
        for index in range(stream.documents)
    ]
    assert sorted(found) == sorted(texts)


def test_an_empty_split_can_be_opened(tmp_path):
    import datasets

    splits = {"train": 1.0, "validation": 0.0, "test": 0.0}
    config = files_config(write_files(tmp_path / "raw", ["one"]) / "*", splits=splits)
    manifest, folder = build(config, tmp_path)
    assert [len(split.shards) for split in manifest.splits.values()] == [1, 0, 0]
    assert len(datasets.load_from_disk(str(folder))["test"]) == 0
    assert open_split(folder, "test").documents == 0
    verify_dataset(folder)


def test_equal_files_are_documents_of_their_own(tmp_path):
    texts = large_texts(20)
    for name in ("a.parquet", "b.parquet"):
        write_parquet(tmp_path / name, texts, row_group_size=5)
    config = files_config(tmp_path / "*.parquet", partition_megabytes=1)
    manifest, _ = build(config, tmp_path)
    assert len(manifest.partitions) == 2 * len(set(manifest.partitions)) > 2
    assert manifest.documents == 2 * len(texts)


@given(st.lists(st.text(max_size=9), max_size=30), st.integers(1, 7))
def test_documents_are_encoded_in_slices_of_bounded_size(texts, batch_size):
    whole = pa.array(["x", *texts], pa.string()).slice(1)
    batches = list(slices(whole, batch_size))
    assert [text for batch in batches for text in batch.to_pylist()] == texts
    assert all(1 <= len(batch) <= batch_size for batch in batches)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 254), max_size=5), max_size=8), max_size=4),
    st.sampled_from([np.uint8, np.uint16, np.int32]),
    st.data(),
)
def test_documents_are_written_in_order_with_the_tokens_around_them(
    tmp_path_factory, batches, dtype, data
):
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "key", "train", np.dtype(dtype))
    expected = []
    bos = data.draw(st.none() | st.integers(0, 255))
    for documents in batches:
        rows = data.draw(st.permutations(range(len(documents))))
        rows = rows[: data.draw(st.integers(0, len(rows)))]
        ids = np.array([*itertools.chain(*documents)], np.int32)
        encoded = Ragged(ids, np.cumsum([0, *map(len, documents)]))
        if rows:
            writer.add(as_rows(encoded, np.dtype(dtype), 255, bos), np.array(rows))
        expected += [[*([] if bos is None else [bos]), *documents[row], 255] for row in rows]
    shards = writer.close()
    assert len(shards) == bool(expected)
    for shard in shards:
        with pa.memory_map(str(folder / shard.file)) as source:
            column = pa.ipc.open_stream(source).read_next_batch().column(0)
        assert column.type.value_type == pa.from_numpy_dtype(dtype)
        assert column.to_pylist() == expected
        assert (shard.documents, shard.tokens) == (len(expected), sum(map(len, expected)))


def test_a_record_with_a_name_that_is_not_utf8_is_refused_in_one_line(tmp_path):
    file = SourceFile(address="/a/\udc80.txt", bytes=3, fingerprint="sha256:ab", version="1")
    path = tmp_path / "listing.json"
    with pytest.raises(DataError, match=r"listing\.json: cannot be written: .*'\\udc80'"):
        write_record(path, Listing(ranges=[FileRange(file=file)]))
    assert not path.exists()
