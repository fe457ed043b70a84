"""A hub dataset becomes Parquet files: pinned, resumed, never downloaded twice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corpora import build, make_texts, write_parquet
from local_hub import Repository, serve_hub

from infini_model.config import DataConfig, HubSource
from infini_model.data.manifest import SPLITS
from infini_model.data.shards.stream import open_split
from infini_model.data.sources.download import download
from infini_model.data.sources.hub import fetch_dataset
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime.errors import DataError

TEXTS = ["short", *make_texts(99, longest=40)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub") / "repository"
    write_parquet(root / "train-0.parquet", TEXTS[:60])
    write_parquet(root / "train-1.parquet", TEXTS[60:])
    write_parquet(root / "test.parquet", ["only this"])
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def config_of(repository, **fields):
    return DataConfig(source=HubSource(repository=str(repository), **fields))


def rows_of(paths):
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]


def test_a_split_is_streamed_into_bounded_files(repository, tmp_path):
    source = HubSource(repository=str(repository))
    files = fetch_dataset(source, tmp_path / "raw", file_bytes=2000, batch_rows=7)
    assert len(files) > 3
    assert rows_of(files) == TEXTS
    assert all(path.is_relative_to(tmp_path / "raw") for path in files)
    other = fetch_dataset(source.model_copy(update={"split": "test"}), tmp_path / "raw")
    assert rows_of(other) == ["only this"]


def test_the_limit_counts_rows_before_the_filter(repository, tmp_path):
    config = config_of(repository, limit=10, min_characters=6)
    assert rows_of(fetch_dataset(config.source, tmp_path / "raw")) == TEXTS[:10]
    manifest, folder = build(config, tmp_path)
    kept = [text for text in TEXTS[:10] if len(text) >= 6]
    assert (manifest.documents, manifest.corpus.skipped) == (len(kept), 10 - len(kept))
    streams = [open_split(folder, split) for split in SPLITS]
    found = [
        ByteTokenizer().decode(stream.document(index))
        for stream in streams
        for index in range(stream.documents)
    ]
    assert sorted(found) == sorted(kept)


def test_plain_files_of_a_local_repository_are_read_in_place(repository, tmp_path):
    listing = download(config_of(repository), tmp_path)
    names = [Path(part.file.address) for part in listing.ranges]
    assert [path.name for path in names] == ["train-0.parquet", "train-1.parquet"]
    assert all(path.is_relative_to(repository) for path in names)
    assert not (tmp_path / "raw").exists()


def test_a_complete_download_is_never_repeated(repository, tmp_path):
    copy = shutil.copytree(repository, tmp_path / "copy")
    source = HubSource(repository=str(copy))
    files = fetch_dataset(source, tmp_path / "raw")
    stamps = [path.stat().st_mtime_ns for path in files]
    assert fetch_dataset(source, tmp_path / "raw") == files
    assert [path.stat().st_mtime_ns for path in files] == stamps
    (record,) = (tmp_path / "raw").glob("*/complete.json")
    complete = json.loads(record.read_text())
    assert complete["rows"] == 100
    assert len(complete["commit"]) == 64
    write_parquet(copy / "train-2.parquet", ["another"])
    assert len(rows_of(fetch_dataset(source, tmp_path / "raw"))) == 101


def test_a_killed_download_resumes_after_its_last_file(repository, tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from infini_model.config import HubSource
from infini_model.data.sources import hub
def die(done, total):
    if done > 10_000:
        os.kill(os.getpid(), signal.SIGKILL)
source, raw_dir = HubSource(repository=sys.argv[1]), Path(sys.argv[2]) / "raw"
hub.fetch_dataset(source, raw_dir, die, file_bytes=4000, batch_rows=7)
"""
    subprocess.run([sys.executable, "-c", script, str(repository), str(tmp_path)])
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "raw").rglob("part-*.parquet")}
    assert there
    assert not list((tmp_path / "raw").rglob("complete.json"))
    source = HubSource(repository=str(repository))
    assert rows_of(fetch_dataset(source, tmp_path / "raw")) == TEXTS
    assert {path: path.stat().st_mtime_ns for path in there} == there


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"column": "article"}, "has no column 'article'; it has: text, number"),
        ({"column": "number"}, "column 'number' is int64, not text"),
        ({"split": "dev"}, "dev"),
        ({"configuration": "other"}, "other"),
    ],
)
def test_what_does_not_exist_is_named_in_one_line(repository, tmp_path, fields, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        download(config_of(repository, **fields), tmp_path)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "raw").rglob("*.parquet"))


@pytest.fixture
def hub():
    from infini_model.data.tokenizers.bpe import train_tokenizer

    tokenizer = train_tokenizer([TEXTS], 280)
    with serve_hub() as server:
        server.repositories["team/data"] = Repository({"train.csv": b"text"})
        server.repositories["team/model"] = Repository({"tokenizer.json": tokenizer.text.encode()})
        yield server, tokenizer.fingerprint


ASK = """
import sys
from infini_model.config import HubSource
from infini_model.data.sources.hub.access import pin
from infini_model.data.tokenizers.load import load_tokenizer
kind, name = sys.argv[1:]
try:
    if kind == "tokenizer":
        print(load_tokenizer(name).fingerprint)
    else:
        print(pin(HubSource(repository=name)))
except (ValueError, ConnectionError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def ask(address, home, kind, name, offline="0"):
    """A new process, since the hub's address is read when its package is imported."""
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    environment["HF_HUB_OFFLINE"] = offline
    done = subprocess.run(
        [sys.executable, "-c", ASK, kind, name], env=environment, capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr


def test_revisions_are_pinned_and_tokenizers_fetched_once(hub, tmp_path):
    server, fingerprint = hub
    address, requests = server.address, server.requests
    commit = server.repositories["team/data"].commit
    assert ask(address, tmp_path, "dataset", "team/data") == commit
    assert ask(address, tmp_path, "tokenizer", "team/model") == fingerprint
    downloads = len(requests)
    assert ask(address, tmp_path, "tokenizer", "team/model") == fingerprint
    assert len(requests) <= downloads + 1
    for kind in ("dataset", "tokenizer"):
        line = ask(address, tmp_path, kind, "team/gone")
        assert line.startswith(f"DataError: {kind} team/gone: ")
        assert "\n" not in line


def test_a_hub_that_does_not_answer_is_a_connection_error(tmp_path):
    # The hub's package retries a tokenizer for half a minute, unless it is offline.
    for kind, name, offline in (("dataset", "team/data", "0"), ("tokenizer", "team/model", "1")):
        line = ask("http://127.0.0.1:9", tmp_path, kind, name, offline)
        assert line.startswith(f"UnreachableError: {kind} {name}: the hub cannot be reached")
        assert "\n" not in line
