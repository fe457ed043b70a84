"""Of the Hugging Face hub: files read by ranges, datasets streamed, tokenizers and weights."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import make_texts, write_parquet
from local_hub import TOKEN, Repository, git_id, serve_hub, sha256

from infini_model.config import HubSource
from infini_model.data.sources.hub import fetch_dataset
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime import storage

# A process of its own, since the hub's address is read when its package is imported. It answers a
# line of JSON with another; pauses between retries are left out.
CLIENT = """
import contextlib, json, os, pathlib, sys, tempfile, time
import pyarrow.parquet as pq
from infini_model.config import HubSource
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import Reading, read_range
from infini_model.data.sources.hub import fetch_dataset, fetch_weights, list_dataset
from infini_model.data.tokenizers.load import load_tokenizer

time.sleep = lambda seconds: None

def login(token):
    os.environ["HF_TOKEN"] = token

def read(ranges):
    parts = map(FileRange.model_validate, ranges)
    arrays = (array for part in parts for array in read_range(part, Reading()))
    return [text for array in arrays for text in array.to_pylist()]

def listing(source, folder=None):
    found = list_dataset(HubSource(**source), pathlib.Path(folder or tempfile.mkdtemp()))
    return found and [one.model_dump() for one in found]

def stream(repository, split):
    import datasets
    rows = datasets.load_dataset(repository, split=split, streaming=True)
    return [row["text"] for row in rows]

def fetch(source, folder):
    paths = fetch_dataset(HubSource(**source), pathlib.Path(folder))
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]

def tokenizer(name):
    return load_tokenizer(name).fingerprint

def weights(name, commit):
    seen = []
    return str(fetch_weights(name, commit, lambda *position: seen.append(position))), seen

for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = [globals()[name](*arguments), None]
    except (ValueError, ConnectionError) as error:
        answer = [None, f"{type(error).__name__}: {error}"]
    print(json.dumps(answer), flush=True)
"""


@contextlib.contextmanager
def client_of(address, home):
    """A function that asks a client for an answer or an error."""
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def ask(*command):
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            answer, error = json.loads(process.stdout.readline())
            assert error is None or "\n" not in error
            return answer, error

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def client(hub, home):
    with client_of(hub.address, home) as ask:
        yield ask


@pytest.fixture
def ask(hub, client):
    """Returns the answer, and what was asked of the hub for it."""

    def both(*command):
        before = len(hub.requests)
        answer, error = client(*command)
        assert error is None, error
        return answer, hub.requests[before:]

    yield both
    hub.cuts = hub.busy = 0
    hub.ranges = True


def parquet(texts, group=None):
    """A file of which every byte has to be read for all of its columns."""
    sink = pa.BufferOutputStream()
    noise = [os.urandom(64)] * len(texts)
    table = pa.table({"text": texts, "number": range(len(texts)), "noise": noise})
    pq.write_table(table, sink, row_group_size=group, compression="none", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def ranges_of(requests, path):
    return [each for each in requests if each.method == "GET" and path in each.path]


TEXTS = make_texts(60, longest=60)
README = b"""---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: [zeta.parquet, "parts/*.parquet"]
  - split: validation
    path: held_out.parquet
- config_name: lines
  data_files: lines/*
---
"""
NAME = "team/data"
SOURCE = {"repository": NAME}


@pytest.fixture(scope="module")
def repository(hub):
    """Two splits by a README, not in the order of the names of their files."""
    files = {
        "README.md": README,
        "zeta.parquet": parquet(TEXTS[:20], 6),
        "parts/a b#1.parquet": parquet(TEXTS[20:30], 5),
        "parts/b.parquet": parquet(TEXTS[30:]),
        "held_out.parquet": parquet(["held", None, ""]),
    }
    hub.repositories[NAME] = Repository(files)
    return hub.repositories[NAME]


@pytest.fixture(scope="module")
def of_lines(hub):
    """Two splits by the names of folders."""
    files = {
        "train/b.jsonl": lines(TEXTS[:9]),
        "train/a.jsonl.gz": gzip.compress(lines(TEXTS[9:20]), mtime=0),
        "validation/c.jsonl": lines(["only"]),
    }
    hub.repositories["team/lines"] = Repository(files)
    return hub.repositories["team/lines"]


def test_files_hold_what_datasets_streams(repository, of_lines, ask):
    for name in (NAME, "team/lines"):
        for split in ("train", "validation"):
            listed, _ = ask("listing", {"repository": name, "split": split})
            assert all(one["stop"] is one["rows"] is None for one in listed)
            assert ask("read", listed)[0] == ask("stream", name, split)[0]


def test_a_file_is_named_by_commit_and_identified_by_content_without_reading_it(
    repository, of_lines, ask, tmp_path
):
    listed, requests = ask("listing", SOURCE, str(tmp_path))
    zeta, first, _ = [one["file"] for one in listed]
    assert zeta == {
        "address": f"hf://datasets/team/data@{repository.commit}/zeta.parquet",
        "bytes": len(repository.files["zeta.parquet"]),
        "fingerprint": f"sha256:{sha256(repository.files['zeta.parquet'])}",
        "version": repository.commit,
    }
    assert first["address"].endswith("/parts/a b#1.parquet")
    # The footer of the first file, for its schema.
    assert len({each.path for each in ranges_of(requests, "/storage/")}) == 1
    assert not ranges_of(requests, "parts/")
    # An unchanged commit is listed once.
    again, requests = ask("listing", SOURCE, str(tmp_path))
    assert again == listed
    assert [each.path for each in requests] == ["/api/datasets/team/data"]
    assert ask("listing", SOURCE | {"limit": 24}, str(tmp_path))[0] != listed
    (one,), requests = ask("listing", {"repository": "team/lines", "split": "validation"})
    small = of_lines.files["validation/c.jsonl"]
    assert one["file"]["fingerprint"] == f"git:{git_id(small)}"
    assert not ranges_of(requests, "/resolve/")


def test_a_limit_is_a_prefix_in_file_order(repository, ask):
    # At and around the ends of row groups and of files, with the group in which each ends.
    for limit, stop in ((6, 1), (7, 2), (20, None), (21, 1), (61, None)):
        listed, requests = ask("listing", SOURCE | {"limit": limit})
        names = [one["file"]["address"].rpartition("/")[2] for one in listed]
        needed = 1 + (limit > 20) + (limit > 30)
        assert names == ["zeta.parquet", "a b#1.parquet", "b.parquet"][:needed]
        assert listed[-1]["stop"] == stop
        # A footer each, by one range.
        assert len(ranges_of(requests, "/storage/")) == needed
        assert ask("read", listed)[0] == TEXTS[:limit]


def test_only_the_ranges_that_are_needed_are_fetched_though_the_hub_fails_at_times(
    hub, client, ask
):
    texts = ["x" * 1000] * 2000
    data = parquet(texts, 100)
    hub.repositories["team/large"] = Repository({"a.parquet": data, "b.parquet": data})
    listed, requests = ask("listing", {"repository": "team/large", "limit": 150})
    assert [(one["stop"], one["rows"]) for one in listed] == [(2, 150)]
    assert sum(each.sent for each in ranges_of(requests, "/storage/")) <= 64 << 10
    read, requests = ask("read", listed)
    assert read == texts[:150]
    fetched = sum(each.sent for each in ranges_of(requests, "/storage/"))
    assert 200_000 < fetched < 200_000 * 1.1 + (64 << 10)
    # Nothing but ranges: no listing of a folder, no question whether the repository exists.
    assert not [each for each in requests if "/api/" in each.path]
    for name, value in (("cuts", 3), ("busy", 3), ("ranges", False)):
        setattr(hub, name, value)
        assert ask("read", listed)[0] == texts[:150]
        assert not getattr(hub, name)
        hub.ranges = True
    address = listed[0]["file"]["address"]
    for name in ("cuts", "busy"):
        setattr(hub, name, 1000)
        _, error = client("read", listed)
        assert error.startswith(f"UnreachableError: {address}: the hub cannot be reached: ")
        assert "hf_" not in error.replace(address, "")
        setattr(hub, name, 0)


def test_without_a_hub_there_is_a_connection_error(tmp_path):
    with client_of("http://127.0.0.1:9", tmp_path) as ask:
        for what, name, *command in (
            ("dataset", NAME, "listing", SOURCE),
            ("tokenizer", "team/llama", "tokenizer", "team/llama"),
            ("model", "team/llama", "weights", "team/llama", "0" * 40),
        ):
            _, error = ask(*command)
            assert error.startswith(f"UnreachableError: {what} {name}: the hub cannot be reached")


def test_a_file_that_is_gone_is_named(repository, client, ask):
    listed, _ = ask("listing", SOURCE | {"split": "validation"})
    file = listed[0]["file"]
    for old, new, reason in (
        ("held_out", "gone", "not found (HTTP 404)"),
        (repository.commit, "0" * 40, "has no such revision (HTTP 404)"),
        (NAME, "team/gone", "does not exist on the hub, or is private"),
    ):
        address = file["address"].replace(old, new)
        _, error = client("read", [{"file": file | {"address": address}}])
        assert error.startswith(f"DataError: {address}: {reason}")


def test_what_does_not_exist_is_named_in_one_line(hub, repository, client):
    choice = b"---\nconfigs:\n- config_name: a\n- config_name: b\n---\n"
    hub.repositories["team/choice"] = Repository({"README.md": choice, "a.parquet": b""})
    hub.repositories["team/damaged"] = Repository({"train.parquet": b"PAR1" + b"x" * 100})
    for fields, complaint in (
        ({"repository": "team/gone"}, "team/gone: does not exist on the hub, or is private"),
        ({"revision": "v9"}, "dataset team/data: has no revision 'v9'; it has: main"),
        ({"configuration": "other"}, "'other' not found. Available: ['main', 'lines']"),
        ({"repository": "team/choice"}, "pick one among the available configs: ['a', 'b']"),
        ({"split": "dev"}, "has no split 'dev'; it has: train, validation"),
        ({"column": "article"}, "has no column 'article'; it has: text, number, noise"),
        ({"repository": "team/damaged"}, "train.parquet: cannot be read: "),
    ):
        _, error = client("listing", SOURCE | fields)
        assert error.startswith("DataError: ")
        assert complaint in error


def test_what_is_no_plain_file_is_left_to_streaming(hub, ask):
    for files, fields in (
        ({"train.csv": b"text\nhello\n"}, {}),
        ({"train.jsonl": lines(["a", "b"])}, {"limit": 1}),
        ({"train.parquet": parquet(["a"])}, {"column": "number"}),
        ({"train.jsonl": lines(["a"]), "test.jsonl": lines(["b"])}, {"split": "train+test"}),
    ):
        hub.repositories["team/other"] = Repository(files)
        assert ask("listing", {"repository": "team/other"} | fields)[0] is None


def test_what_is_streamed_is_streamed_once_until_it_changes(hub, ask, client, tmp_path):
    hub.repositories["team/table"] = Repository({"train.csv": b"text\nhello\nworld\n"})
    source = {"repository": "team/table"}
    assert ask("fetch", source, str(tmp_path))[0] == ["hello", "world"]
    again, requests = ask("fetch", source, str(tmp_path))
    assert again == ["hello", "world"]
    assert [each.path for each in requests] == ["/api/datasets/team/table"]
    _, error = client("fetch", source | {"column": "article"}, str(tmp_path))
    assert error == "DataError: dataset team/table: has no column 'article'; it has: text"
    hub.repositories["team/table"] = Repository({"train.csv": b"text\nother\n"})
    assert ask("fetch", source, str(tmp_path))[0] == ["other"]


def test_a_gated_dataset_needs_a_token_that_no_message_shows(hub, client, ask):
    gated = Repository({"train.parquet": parquet(["secret"])}, gated=True)
    hub.repositories["team/gated"] = gated
    address, source = f"hf://datasets/team/gated@{gated.commit}/train.parquet", "team/gated"
    file = {"address": address, "bytes": 9, "fingerprint": "", "version": ""}
    for token in ("", "hf_wrong"):
        client("login", token)
        _, error = client("listing", {"repository": source})
        assert error.startswith("DataError: dataset team/gated: ")
        _, refused = client("read", [{"file": file}])
        assert refused.startswith(f"DataError: {address}: is gated: ask for access")
        assert "hf_wrong" not in error + refused
    client("login", TOKEN)
    listed, _ = ask("listing", {"repository": source})
    read, requests = ask("read", listed)
    client("login", "")
    assert read == ["secret"]
    # The storage has its own signature; the token is for the hub alone.
    assert {each.authorized for each in ranges_of(requests, "/resolve/")} == {True}
    assert {each.authorized for each in ranges_of(requests, "/storage/")} == {False}


def test_a_split_is_streamed_into_bounded_files_and_goes_on_after_the_last(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, raw = tmp_path / "team", tmp_path / "raw"
    write_parquet(folder / "train-0.parquet", TEXTS[:40])
    write_parquet(folder / "train-1.parquet", TEXTS[40:])

    def fetched(**fields):
        paths = fetch_dataset(HubSource(repository=str(folder), **fields), raw)
        return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]

    def end(done, total):
        if done > 5000:
            raise InterruptedError

    source = HubSource(repository=str(folder))
    with pytest.raises(InterruptedError):
        fetch_dataset(source, raw, end, file_bytes=2000, batch_rows=7)
    there = {path: path.stat().st_mtime_ns for path in raw.rglob("part-*.parquet")}
    assert there
    assert fetched() == TEXTS
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert len(fetch_dataset(source, tmp_path / "anew", file_bytes=2000, batch_rows=7)) > 3
    assert fetched(limit=41) == TEXTS[:41]


def test_a_tokenizer_is_fetched_or_named(hub, ask, client):
    trained = train_tokenizer([TEXTS], 280)
    hub.repositories["team/llama"] = Repository({"tokenizer.json": trained.text.encode()})
    assert ask("tokenizer", "team/llama")[0] == trained.fingerprint
    _, error = client("tokenizer", "team/gone")
    assert error.startswith("DataError: tokenizer team/gone: ")
    for name, said in (("bytes", b'{"infini_tokenizer": "bytes"}'), ("none", b"{}")):
        hub.repositories[f"team/{name}"] = Repository({"config.json": said})
    assert ask("tokenizer", "team/bytes")[0] == ByteTokenizer.fingerprint
    _, error = client("tokenizer", "team/none")
    assert error == "DataError: team/none: has no tokenizer.json"


WEIGHTS = {f"model-{number}-of-3.safetensors": os.urandom(40_000 + number) for number in range(3)}
WEIGHTS["config.json"] = b"{}"
# Neither a pickle nor a copy of the weights is fetched.
OTHERS = {"model.bin": b"pickle", "original/consolidated.safetensors": b"a copy"}


def test_weights_are_fetched_once_though_a_download_is_killed_and_progress_counts_all(
    hub, ask, home
):
    hub.repositories["team/weights"] = Repository(WEIGHTS | OTHERS)
    commit, total = hub.repositories["team/weights"].commit, sum(map(len, WEIGHTS.values()))
    (name, seen), _ = ask("weights", "team/weights", commit)
    assert seen == sorted(seen)
    assert len(seen) == len(WEIGHTS)
    assert seen[-1] == [total, total]

    # What a killed download has left goes; what another one writes stays.
    blobs = Path(name).parents[1] / "blobs"
    one, other = (path.name for path in sorted(blobs.iterdir())[:2])
    left, written = (blobs / f"{blob}.1234abcd.incomplete" for blob in (one, other))
    for path in (left, written):
        path.write_bytes(b"half")
    with storage.lock(home / "hub" / ".locks" / "models--team--weights" / f"{other}.lock"):
        assert ask("weights", "team/weights", commit)[0] == [name, []]
    assert [path.exists() for path in (left, written)] == [False, True]
