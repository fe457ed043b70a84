"""Shards depend only on content, are reused by content, and survive failures."""

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

from infini_model.config import SplitsConfig, TokenizerConfig
from infini_model.data.manifest import (
    SPLITS,
    Bucket,
    Corpus,
    RawFile,
    latest_dataset,
    read_manifest,
    verify_dataset,
)
from infini_model.data.shards.dataset import build_dataset, dataset_key
from infini_model.data.shards.partitions import _batches, _Encoded, partition_key
from infini_model.data.shards.stream import open_split
from infini_model.data.sources.corpus import spill_folder as spill_path
from infini_model.data.sources.download import download, spill_folder
from infini_model.data.sources.formats import Reading
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime import storage
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
    return np.concatenate(stream.values).tolist(), stream.document_offsets.tolist()


def leftovers(output_dir):
    return [*output_dir.rglob(".tmp-*"), *output_dir.rglob("*.spill")]


def partitions_of(output_dir):
    return {
        path.name: path.stat().st_ino
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
        assert rows.features["input_ids"].feature.dtype == stream.values[0].dtype.name
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
    shuffled = texts.copy()
    random.Random(0).shuffle(shuffled)
    raw = write_files(tmp_path / "raw", texts)
    other = write_parquet(tmp_path / "raw.parquet", shuffled)
    made = []
    for number, (source, fields) in enumerate(
        [
            (raw / "*.txt", {"partition_megabytes": 64, "workers": 1}),
            (raw / "*.txt", {"partition_megabytes": 1, "workers": 2}),
            (other, {"partition_megabytes": 1, "workers": 1, "batch_size": 3}),
        ]
    ):
        config = files_config(source, splits=THIRDS, **fields)
        made.append(build(config, tmp_path / str(number)))
    manifests, folders = zip(*made, strict=True)
    assert len({manifest.key for manifest in manifests}) == 1
    for split in SPLITS:
        first = stream_of(folders[0], split)
        assert all(stream_of(folder, split) == first for folder in folders[1:])
    assert shard_bytes(folders[1]) == shard_bytes(folders[2])
    assert len(shard_bytes(folders[0])) == 3 < len(shard_bytes(folders[1]))


def test_the_key_depends_only_on_content(tmp_path):
    corpus = download(files_config(write_files(tmp_path / "raw", ["a", "b"]) / "*"), tmp_path)
    config = files_config("x")
    key = dataset_key(corpus, ByteTokenizer(), config.splits)
    moved = corpus.model_copy(update={"files": [], "skipped": 9, "buckets": []})
    assert dataset_key(moved, ByteTokenizer(), config.splits) == key
    other = files_config("x", splits=THIRDS)
    assert dataset_key(corpus, ByteTokenizer(), other.splits) != key
    changed = corpus.model_copy(update={"fingerprint": "0"})
    assert dataset_key(changed, ByteTokenizer(), config.splits) != key


def test_keys_of_existing_folders_do_not_change():
    """Datasets, partitions and scanned sources on disk are found by these keys."""
    bucket = Bucket(documents=2, bytes=3, digest="ab" * 32)
    corpus = Corpus(
        files=[], documents=2, bytes=3, skipped=0, fingerprint="cd" * 32, buckets=[bucket]
    )
    splits = SplitsConfig(**THIRDS)
    assert dataset_key(corpus, ByteTokenizer(), splits) == (
        "25baa9f311a2f784393b27f74b0076e271d21226a118e38f1b39650571176450"
    )
    assert partition_key(bucket, ByteTokenizer(), splits) == "44c52ff59ca9f75e892cc6b70690b5e8"
    file = RawFile(path=Path("a.jsonl"), bytes=3, sha256="ef" * 32)
    assert spill_path([file], Reading(), 1 << 20, Path()).stem == "b1b619f1f2ceb6b2b877ad8c3f54549a"


def test_a_new_file_remakes_one_partition_and_renaming_none(tmp_path):
    raw = write_files(tmp_path / "raw", large_texts())
    config = files_config(raw / "*.txt", partition_megabytes=1)
    _, folder = build(config, tmp_path)
    before = partitions_of(tmp_path)
    assert len(before) == 4
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


def test_a_moved_output_folder_is_reused(tmp_path):
    config = files_config(write_files(tmp_path / "raw", ["a", "b"]) / "*")
    _, folder = build(config, tmp_path / "output")
    before = partitions_of(tmp_path / "output")
    (tmp_path / "output").rename(tmp_path / "moved")
    _, found = build(config, tmp_path / "moved")
    assert found == tmp_path / "moved" / "datasets" / folder.name
    assert partitions_of(tmp_path / "moved") == before


def test_a_source_is_read_once(tmp_path):
    raw = write_files(tmp_path / "raw", make_texts(5))
    config = files_config(raw / "*.txt")
    corpus = download(config, tmp_path)
    shutil.rmtree(raw)
    first = build_dataset(corpus, config, tmp_path)
    assert build_dataset(corpus, config, tmp_path) == first
    with pytest.raises(DataError, match=r"0000\.txt: does not exist"):
        build_dataset(corpus, config, tmp_path / "elsewhere")
    assert not leftovers(tmp_path)


def test_a_file_that_changes_after_the_scan_is_detected(tmp_path):
    raw = write_files(tmp_path / "raw", make_texts(5))
    config = files_config(raw / "*.txt")
    corpus = download(config, tmp_path)
    shutil.rmtree(spill_folder(corpus, config, tmp_path))
    (raw / "0000.txt").write_text("changed")
    with pytest.raises(DataError, match="a file changed while it was read"):
        build_dataset(corpus, config, tmp_path)
    assert not partitions_of(tmp_path)
    assert not leftovers(tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["texts", "entries", "runs.json"])
@pytest.mark.parametrize("harm", [flip, halve, Path.unlink, lambda path: os.truncate(path, 0)])
def test_a_damaged_spill_is_written_again_from_the_source(tmp_path, harm, name):
    raw = write_parquet(tmp_path / "a.parquet", large_texts())
    config = files_config(raw, partition_megabytes=1, workers=2)
    _, folder = build(config, tmp_path / "whole")
    corpus = download(config, tmp_path)
    harm(spill_folder(corpus, config, tmp_path) / name)
    reports = []
    manifest = build_dataset(corpus, config, tmp_path, progress=lambda *seen: reports.append(seen))
    assert shard_bytes(tmp_path / "datasets" / manifest.folder_name) == shard_bytes(folder)
    done, total = reports[-1]
    assert done == total
    # The flipped bit is in a low word, which only the scan reads.
    if (harm, name) != (flip, "entries"):
        assert total == raw.stat().st_size + corpus.bytes
    assert not leftovers(tmp_path)


def test_a_spill_is_deleted_when_it_is_not_needed(tmp_path):
    corpora = tmp_path / "datasets" / ".corpora"
    raw = write_files(tmp_path / "raw", make_texts(5))
    config = files_config(raw / "*.txt")
    corpus = download(config, tmp_path)
    first = spill_folder(corpus, config, tmp_path)
    assert list(corpora.glob("*.spill")) == [first]
    build_dataset(corpus, config, tmp_path)
    assert not list(corpora.glob("*.spill"))
    # Another tokenizer reads the source again and leaves no spill either.
    other = config.model_copy(update={"tokenizer": TokenizerConfig(spec="train", vocab_size=280)})
    build_dataset(corpus, other, tmp_path)
    assert not list(corpora.glob("*.spill"))
    assert not leftovers(tmp_path)


def test_the_next_scan_of_any_source_deletes_what_a_killed_one_left(tmp_path):
    corpora = tmp_path / "datasets" / ".corpora"
    configs = [
        files_config(write_files(tmp_path / str(number), make_texts(5, number)) / "*")
        for number in range(2)
    ]
    build(configs[0], tmp_path)
    script = """
from infini_model.data.sources import spill
spill._Writer.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(script, configs[1], tmp_path).returncode == -signal.SIGKILL
    assert len(list(corpora.glob("*.spill"))) == 1
    build(configs[0], tmp_path)
    assert not leftovers(tmp_path)


def test_only_the_newest_spill_is_kept_besides_those_being_written(tmp_path):
    corpora = tmp_path / "datasets" / ".corpora"
    kept = []

    def scan(number):
        config = files_config(write_files(tmp_path / str(number), make_texts(5, number)) / "*")
        kept.append(spill_folder(download(config, tmp_path), config, tmp_path))
        assert kept[-1].is_dir()

    scan(0)
    scan(1)
    assert not kept[0].exists()
    with storage.lock(corpora / ".locks" / kept[1].stem):
        scan(2)
    assert sorted(corpora.glob("*.spill")) == sorted(kept[1:])


@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: os.truncate(path, 100)])
def test_only_a_damaged_shard_is_named_and_made_again(tmp_path, harm):
    config = files_config(
        write_parquet(tmp_path / "a.parquet", large_texts()), partition_megabytes=1, workers=1
    )
    manifest, folder = build(config, tmp_path)
    whole, inodes = shard_bytes(folder), partitions_of(tmp_path)
    shard = manifest.splits["train"].shards[2]
    harmed = folder / "train" / shard.file
    harm(harmed)
    with pytest.raises(DataError, match=rf"^{harmed}: (is missing|is damaged|has 100 bytes)"):
        verify_dataset(folder)
    build(config, tmp_path)
    assert shard_bytes(verify_dataset_folder(folder)) == whole
    remade = {key for key, inode in partitions_of(tmp_path).items() if inodes[key] != inode}
    # A missing link is linked again; damage to the file also damages the partition.
    assert remade == (set() if harm is Path.unlink else {shard.partition})
    assert not leftovers(tmp_path)


def verify_dataset_folder(folder):
    verify_dataset(folder)
    return folder


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
    ingredients = json.dumps(manifest.ingredients, sort_keys=True)
    assert hashlib.sha256(ingredients.encode()).hexdigest() == manifest.key
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
    raw = write_parquet(tmp_path / "a.parquet", large_texts(60))
    config = files_config(raw, partition_megabytes=1, workers=2)
    script = """
def die(done, total):
    if done > total * 0.9:
        os.kill(os.getpid(), signal.SIGKILL)
build_whole = build_dataset
build_dataset = lambda *arguments: build_whole(*arguments, progress=die)
"""
    killed = run(script, config, tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = partitions_of(tmp_path / "killed")
    assert 0 < len(kept) < 8
    _, folder = build(config, tmp_path / "killed")
    assert kept.items() < partitions_of(tmp_path / "killed").items()
    _, expected = build(config.model_copy(update={"workers": 1}), tmp_path / "whole")
    assert shard_bytes(folder) == shard_bytes(expected)
    assert not leftovers(tmp_path)


def test_two_builds_of_one_key_do_the_work_once(tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", large_texts())
    config = files_config(raw, partition_megabytes=1, workers=1)
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
    assert logs.count("4 of 4 partitions made") == 1, logs
    assert logs.count("reused, all checksums verified") == 1, logs


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", large_texts())
    config = files_config(raw, partition_megabytes=1, workers=2)
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"

    def fill(limit):
        full = run(script.format(limit), config, tmp_path)
        assert full.returncode == 2, full.stderr
        assert "cannot be written" in full.stdout
        assert full.stdout.count("\n") == 1
        assert not leftovers(tmp_path)
        assert not list((tmp_path / "datasets").glob("corpus-*"))

    fill(200_000)  # too little for the spilled text
    download(config, tmp_path)
    fill(600_000)  # too little for the shards of a partition; the text was there
    fill(600_000)  # too little for the text, which has to be spilled again
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert verify_dataset(build(config, tmp_path)[1])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    config = files_config(write_parquet(tmp_path / "a.parquet", make_texts(3)))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="out"):
        build(config, tmp_path / "out")


def test_an_error_in_a_worker_keeps_its_type_and_stops_the_others(tmp_path):
    config = files_config(
        write_parquet(tmp_path / "a.parquet", large_texts()), partition_megabytes=1, workers=2
    )
    corpus = download(config, tmp_path)
    wrong = [bucket.model_copy(update={"digest": "0" * 64}) for bucket in corpus.buckets]
    with pytest.raises(DataError, match="a file changed"):
        build_dataset(corpus.model_copy(update={"buckets": wrong}), config, tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]
    assert not leftovers(tmp_path)


@given(st.lists(st.text(max_size=9), max_size=30), st.integers(1, 7), st.integers(0, 40))
def test_documents_are_encoded_in_batches_of_bounded_size(texts, batch_size, most):
    chunks = [pa.array(texts[:3], pa.string()), pa.array(["x", *texts[3:]], pa.string()).slice(1)]
    batches = list(_batches(pa.chunked_array(chunks), batch_size, most))
    assert [text for batch in batches for text in batch.to_pylist()] == texts
    for batch in batches:
        assert 1 <= len(batch) <= batch_size
        assert len(batch) == 1 or sum(len(text.encode()) for text in batch.to_pylist()) <= most


@given(
    st.lists(st.lists(st.integers(0, 254), max_size=5), max_size=8),
    st.sampled_from([np.uint8, np.uint16, np.int32]),
    st.data(),
)
def test_documents_are_taken_in_order_with_end_of_text_tokens(documents, dtype, data):
    rows = data.draw(st.permutations(range(len(documents))))
    rows = rows[: data.draw(st.integers(0, len(rows)))]
    lengths = [*map(len, documents), 1]
    encoded = _Encoded(
        np.array([*itertools.chain(*documents), 255], dtype), np.cumsum([0, *lengths])
    )
    taken = encoded.take(np.array(rows, np.int64))
    assert taken.ids.dtype == dtype
    expected = [[*documents[row], 255] for row in rows]
    assert taken.ids.tolist() == list(itertools.chain(*expected))
    assert taken.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
