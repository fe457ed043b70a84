"""A hub dataset becomes Parquet files: pinned, resumed, never downloaded twice."""

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow.parquet as pq
import pytest
from corpora import make_texts, write_parquet

from infini_model.config import DataConfig, HubSource
from infini_model.data.sources.download import download
from infini_model.data.sources.hub import fetch_dataset
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


def rows_of(corpus):
    return [text for file in corpus.files for text in pq.read_table(file.path)["text"].to_pylist()]


def test_a_split_is_streamed_into_bounded_files(repository, tmp_path):
    source = HubSource(repository=str(repository))
    files = fetch_dataset(source, tmp_path / "raw", file_bytes=2000, batch_rows=7)
    assert len(files) > 3
    corpus = download(config_of(repository), tmp_path)
    assert [file.path for file in corpus.files] == files
    assert rows_of(corpus) == TEXTS
    assert all(file.path.is_relative_to(tmp_path / "raw") for file in corpus.files)
    assert corpus.documents == 100
    other = download(config_of(repository, split="test"), tmp_path)
    assert rows_of(other) == ["only this"]


def test_the_limit_counts_rows_before_the_filter(repository, tmp_path):
    corpus = download(config_of(repository, limit=10, min_characters=6), tmp_path)
    assert rows_of(corpus) == TEXTS[:10]
    kept = sum(len(text) >= 6 for text in TEXTS[:10])
    assert (corpus.documents, corpus.skipped) == (kept, 10 - kept)


def test_a_complete_download_is_never_repeated(repository, tmp_path):
    copy = shutil.copytree(repository, tmp_path / "copy")
    config = config_of(copy)
    corpus = download(config, tmp_path)
    stamps = [file.path.stat().st_mtime_ns for file in corpus.files]
    assert download(config, tmp_path) == corpus
    assert [file.path.stat().st_mtime_ns for file in corpus.files] == stamps
    (record,) = (tmp_path / "raw").glob("*/complete.json")
    complete = json.loads(record.read_text())
    assert complete["rows"] == 100
    assert len(complete["commit"]) == 64
    write_parquet(copy / "train-2.parquet", ["another"])
    assert download(config, tmp_path).documents == 101


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
    assert rows_of(download(config_of(repository), tmp_path)) == TEXTS
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


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the hub that pin a revision and serve a tokenizer."""

    protocol_version = "HTTP/1.1"
    commit = "c" * 40

    def __init__(self, requests, tokenizer, *arguments):
        self.requests = requests
        self.tokenizer = tokenizer
        super().__init__(*arguments)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.requests.append(self.path)
        answer, headers, status = b"", {}, 200
        if self.path.startswith("/api/datasets/team/data"):
            answer = json.dumps({"id": "team/data", "sha": self.commit}).encode()
            headers["Content-Type"] = "application/json"
        elif self.path == "/team/model/resolve/main/tokenizer.json":
            answer, headers = self.tokenizer, {"X-Repo-Commit": self.commit, "ETag": '"e"'}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(answer))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def endpoint():
    from infini_model.data.tokenizers.bpe import train_tokenizer

    tokenizer = train_tokenizer([TEXTS], 280)
    requests: list[str] = []
    text = tokenizer._text.encode()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, requests, text)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests, tokenizer.fingerprint
        server.shutdown()
        thread.join()


ASK = """
import sys
from infini_model.config import HubSource
from infini_model.data.sources import hub
from infini_model.data.tokenizers.load import load_tokenizer
kind, name = sys.argv[1:]
try:
    if kind == "tokenizer":
        print(load_tokenizer(name).fingerprint)
    else:
        print(hub._pin(HubSource(repository=name)))
except (ValueError, ConnectionError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def ask(endpoint, home, kind, name, offline="0"):
    """A new process, since the hub's address is read when its package is imported."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    environment["HF_HUB_OFFLINE"] = offline
    done = subprocess.run(
        [sys.executable, "-c", ASK, kind, name], env=environment, capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr


def test_revisions_are_pinned_and_tokenizers_fetched_once(endpoint, tmp_path):
    address, requests, fingerprint = endpoint
    assert ask(address, tmp_path, "dataset", "team/data") == Hub.commit
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
        assert line.startswith(f"SourceUnreachableError: {kind} {name}: the hub cannot be reached")
        assert "\n" not in line
