"""Plain files of a hub dataset: listed without reading them, then read by ranges."""

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
from corpora import make_texts
from local_hub import TOKEN, Repository, git_id, serve_hub, sha256

from infini_model.config import HubSource
from infini_model.data.sources.files import local_version
from infini_model.data.sources.hub import list_dataset
from infini_model.runtime.errors import DataError

# A process of its own, since the hub's address is read when its package is imported. It answers a
# line of JSON with another; pauses between retries are left out.
CLIENT = """
import contextlib, json, pathlib, sys, tempfile, time
import pyarrow as pa, pyarrow.parquet as pq
from infini_model.config import HubSource
from infini_model.data.sources.files import FileRange, open_source
from infini_model.data.sources.hub import fetch_dataset, list_dataset

time.sleep = lambda seconds: None

def read(ranges):
    texts = []
    for one in map(FileRange.model_validate, ranges):
        with open_source(one.file) as file:
            if one.file.address.endswith(".parquet"):
                parquet = pq.ParquetFile(file)
                groups = list(range(one.start, one.stop or parquet.num_row_groups))
                found = parquet.read_row_groups(groups, ["text"])["text"].to_pylist()
            else:
                packed = one.file.address.endswith(".gz")
                lines = pa.CompressedInputStream(file, "gzip") if packed else file
                found = [json.loads(line)["text"] for line in lines.read().splitlines()]
        texts += found[:one.rows]
    return texts

def listing(source, folder=None):
    found = list_dataset(HubSource(**source), pathlib.Path(folder or tempfile.mkdtemp()))
    return found and [one.model_dump() for one in found]

def stream(repository, configuration=None, split="train", limit=None):
    import datasets
    rows = datasets.load_dataset(repository, configuration, split=split, streaming=True)
    return [row["text"] for row in (rows if limit is None else rows.take(limit))]

def fetch(source, folder):
    paths = fetch_dataset(HubSource(**source), pathlib.Path(folder))
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()]

def small_reads(file, size):
    with open_source(FileRange.model_validate(file).file) as opened:
        return len(b"".join(iter(lambda: opened.read(size), b"")))

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
def client_of(address, home, **variables):
    hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | hub | variables
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(home / "log").open("wb"),
        text=True,
    )
    with process:

        def ask(*command):
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (home / "log").read_text()
            return json.loads(line)

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def hub():
    with serve_hub() as server:
        yield server


@pytest.fixture(scope="module")
def client(hub, tmp_path_factory):
    with client_of(hub.address, tmp_path_factory.mktemp("home")) as ask:
        yield ask


@pytest.fixture
def ask(hub, client):
    """Returns the answer, and what was asked of the hub for it."""
    hub.cuts = hub.busy = 0
    hub.ranges = True

    def both(*command):
        before = len(hub.requests)
        answer, error = client(*command)
        assert error is None, error
        return answer, hub.requests[before:]

    return both


def parquet(texts, group=None, column="text"):
    sink = pa.BufferOutputStream()
    table = pa.table(
        {column: texts, "number": range(len(texts)), "noise": [os.urandom(64)] * len(texts)}
    )
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
  - split: test
    path: test/*
- config_name: lines
  data_files: "lines/*"
---
"""


@pytest.fixture(scope="module")
def by_readme(hub):
    """Two configurations, one of three splits; its files are not in the order of their names."""
    files = {
        "README.md": README,
        "zeta.parquet": parquet(TEXTS[:20], 6),
        "parts/a b#1.parquet": parquet(TEXTS[20:30], 5),
        "parts/b.parquet": parquet(TEXTS[30:]),
        "held_out.parquet": parquet(["held", None, ""]),
        "test/one.parquet": parquet(["first"]),
        "test/two.parquet": parquet(["second"]),
    }
    hub.repositories["team/readme"] = Repository(files)
    return hub.repositories["team/readme"]


@pytest.fixture(scope="module")
def by_name(hub):
    """Three splits by folder and file name, of JSON lines."""
    files = {
        "data/train/b.jsonl": lines(TEXTS[:9]),
        "data/train/a.jsonl.gz": gzip.compress(lines(TEXTS[9:20]), mtime=0),
        "data/validation/c.jsonl": lines(["only"]),
        "data/test/c.jsonl": lines(["last", "line"]),
    }
    hub.repositories["team/names"] = Repository(files)
    return hub.repositories["team/names"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("name", ["team/readme", "team/names"])
def test_files_hold_what_datasets_streams(by_readme, by_name, ask, name, split):
    listed, _ = ask("listing", {"repository": name, "split": split})
    assert all(one["stop"] is one["rows"] is None for one in listed)
    assert ask("read", listed)[0] == ask("stream", name, None, split)[0]


def test_a_file_is_named_by_commit_and_identified_by_content(by_readme, by_name, ask):
    listed, _ = ask("listing", {"repository": "team/readme"})
    zeta, first, _ = [one["file"] for one in listed]
    assert zeta == {
        "address": f"hf://datasets/team/readme@{by_readme.commit}/zeta.parquet",
        "bytes": len(by_readme.files["zeta.parquet"]),
        "fingerprint": f"sha256:{sha256(by_readme.files['zeta.parquet'])}",
        "version": by_readme.commit,
    }
    assert first["address"].endswith("/parts/a b#1.parquet")
    (small,), _ = ask("listing", {"repository": "team/names", "split": "validation"})
    data = by_name.files["data/validation/c.jsonl"]
    assert small["file"]["fingerprint"] == f"git:{git_id(data)}"


def test_no_data_is_read_to_list_it(by_readme, by_name, ask):
    _, requests = ask("listing", {"repository": "team/names"})
    assert not ranges_of(requests, "/data/")
    _, requests = ask("listing", {"repository": "team/readme"})
    # The footer of the first file, for its schema.
    assert len({each.path for each in ranges_of(requests, "/storage/")}) == 1
    assert not ranges_of(requests, "parts/")


def test_an_unchanged_commit_is_listed_once(by_readme, ask, tmp_path):
    source = {"repository": "team/readme", "limit": 25}
    listed, _ = ask("listing", source, str(tmp_path))
    again, requests = ask("listing", source, str(tmp_path))
    assert again == listed
    assert [each.path for each in requests] == ["/api/datasets/team/readme"]
    pinned = source | {"revision": by_readme.commit}
    assert ask("listing", pinned, str(tmp_path)) == (listed, [])
    other, _ = ask("listing", source | {"limit": 24}, str(tmp_path))
    assert other != listed


@pytest.mark.parametrize("limit", [1, 6, 7, 20, 21, 29, 30, 31, 59, 60, 61])
def test_a_limit_is_a_prefix_in_file_order(by_readme, ask, limit):
    listed, requests = ask("listing", {"repository": "team/readme", "limit": limit})
    names = [one["file"]["address"].rpartition("/")[2] for one in listed]
    needed = 1 + (limit > 20) + (limit > 30)
    assert names == ["zeta.parquet", "a b#1.parquet", "b.parquet"][:needed]
    stops = {1: 1, 6: 1, 7: 2, 29: 2, 31: 1, 59: 1}
    assert listed[-1]["stop"] == stops.get(limit, 1 if limit == 21 else None)
    # A footer each, by one range.
    assert len(ranges_of(requests, "/storage/")) == needed
    assert ask("read", listed)[0] == TEXTS[:limit]


def test_no_more_footers_are_read_than_a_limit_needs(hub, ask):
    sizes = [10, 5, 5, 10, 3, 8, 10, 9, 1, 10, 10, 10]
    files = {f"{number:02d}.parquet": parquet(["x"] * size) for number, size in enumerate(sizes)}
    hub.repositories["team/many"] = Repository(files)
    for limit in (10, 11, 34, 60, 71):
        listed, requests = ask("listing", {"repository": "team/many", "limit": limit})
        counts = [one["rows"] or size for one, size in zip(listed, sizes, strict=False)]
        assert sum(counts) == limit
        assert len(ranges_of(requests, "/storage/")) == len(listed)


def test_only_the_ranges_that_are_needed_are_fetched(hub, ask):
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


def test_small_reads_are_served_by_large_ones(hub, ask):
    data = lines(["y" * 1000] * 10_000)
    hub.repositories["team/long"] = Repository({"train.jsonl": data})
    (one,), _ = ask("listing", {"repository": "team/long"})
    size, requests = ask("small_reads", one, 1000)
    assert size == len(data) == sum(each.sent for each in requests)
    assert len(requests) == 2


def test_a_server_may_ignore_ranges(hub, by_readme, ask):
    listed, _ = ask("listing", {"repository": "team/readme"})
    hub.ranges = False
    assert ask("read", listed)[0] == TEXTS


@pytest.mark.parametrize("failure", ["cuts", "busy"])
def test_a_failed_read_is_repeated(hub, by_readme, ask, failure):
    listed, _ = ask("listing", {"repository": "team/readme"})
    setattr(hub, failure, 3)
    texts, _ = ask("read", listed)
    assert texts == TEXTS
    assert getattr(hub, failure) == 0


def test_a_hub_that_keeps_failing_is_a_connection_error(hub, by_readme, client, ask):
    listed, _ = ask("listing", {"repository": "team/readme", "split": "validation"})
    for failure in ("cuts", "busy"):
        setattr(hub, failure, 1000)
        _, error = client("read", listed)
        address = listed[0]["file"]["address"]
        assert error.startswith(f"UnreachableError: {address}: the hub cannot be reached: ")
        assert "\n" not in error
        assert "hf_" not in error.replace(address, "")
        hub.cuts = hub.busy = 0


def test_a_file_that_is_gone_is_named(by_readme, client, ask):
    listed, _ = ask("listing", {"repository": "team/readme", "split": "validation"})
    file = listed[0]["file"]
    for old, new, reason in (
        ("held_out", "gone", "not found (HTTP 404)"),
        (by_readme.commit, "0" * 40, "has no such revision (HTTP 404)"),
        ("team/readme", "team/gone", "does not exist on the hub, or is private"),
    ):
        address = file["address"].replace(old, new)
        _, error = client("read", [{"file": file | {"address": address}}])
        assert error.startswith(f"DataError: {address}: {reason}")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"repository": "team/gone"},
            "dataset team/gone: does not exist on the hub, or is private",
        ),
        ({"revision": "v9"}, "dataset team/readme: has no revision 'v9'; it has: main"),
        ({"revision": "0" * 40}, "0000"),
        ({"configuration": "other"}, "'other' not found. Available: ['main', 'lines']"),
        ({"repository": "team/choice"}, "pick one among the available configs: ['a', 'b']"),
        ({"split": "dev"}, "has no split 'dev'; it has: train, validation, test"),
        ({"column": "article"}, "has no column 'article'; it has: text, number, noise"),
    ],
)
def test_what_does_not_exist_is_named_in_one_line(hub, by_readme, client, fields, complaint):
    choice = b"---\nconfigs:\n- config_name: a\n- config_name: b\n---\n"
    hub.repositories["team/choice"] = Repository({"README.md": choice, "a.parquet": b""})
    _, error = client("listing", {"repository": "team/readme"} | fields)
    assert error.startswith("DataError: ")
    assert complaint in error
    assert "\n" not in error


def test_a_damaged_file_is_named(hub, client):
    hub.repositories["team/damaged"] = Repository({"train.parquet": b"PAR1" + b"x" * 100})
    _, error = client("listing", {"repository": "team/damaged"})
    assert error.startswith("DataError: hf://datasets/team/damaged@")
    assert "train.parquet: cannot be read: " in error


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({"train.csv": b"text\nhello\n"}, {}),
        ({"train.json": b'[{"text": "hello"}]'}, {}),
        ({"train.jsonl": lines(["a", "b"])}, {"limit": 1}),
        ({"train.parquet": parquet(["a"])}, {"column": "number"}),
        (
            {"train.parquet": parquet(["a"]), "test.parquet": parquet(["b"])},
            {"split": "train+test"},
        ),
        (
            {
                "a.parquet": parquet(["a"]),
                "README.md": b"---\nconfigs:\n- config_name: x\n  data_files: a.parquet\n"
                b"  on_bad_files: skip\n---\n",
            },
            {},
        ),
    ],
)
def test_what_is_no_plain_file_is_left_to_streaming(hub, ask, files, fields):
    hub.repositories["team/other"] = Repository(files)
    assert ask("listing", {"repository": "team/other"} | fields)[0] is None


def test_what_is_streamed_is_streamed_once(hub, ask, tmp_path):
    repository = Repository({"train.csv": b"text\nhello\nworld\n"})
    hub.repositories["team/table"] = repository
    source = {"repository": "team/table"}
    assert ask("fetch", source, str(tmp_path))[0] == ["hello", "world"]
    again, requests = ask("fetch", source, str(tmp_path))
    assert again == ["hello", "world"]
    assert [each.path for each in requests] == ["/api/datasets/team/table"]


def test_a_gated_dataset_needs_a_token_that_no_message_shows(hub, client, tmp_path):
    repository = Repository({"train.parquet": parquet(["secret"])}, gated=True)
    hub.repositories["team/gated"] = repository
    source = {"repository": "team/gated"}
    _, error = client("listing", source)
    assert error.startswith("DataError: dataset team/gated: ")
    assert "gated" in error
    wrong = "hf_wrong"
    with client_of(hub.address, tmp_path, HF_TOKEN=wrong) as ask:
        _, error = ask("listing", source)
        assert error.startswith("DataError: dataset team/gated: ")
        address = f"hf://datasets/team/gated@{repository.commit}/train.parquet"
        file = {"address": address, "bytes": 9, "fingerprint": "", "version": ""}
        _, refused = ask("read", [{"file": file}])
        assert refused.startswith(f"DataError: {address}: is gated: ask for access")
    assert not [text for text in (error, refused) if wrong in text]
    with client_of(hub.address, tmp_path, HF_TOKEN=TOKEN) as ask:
        listed, error = ask("listing", source)
        assert error is None
        before = len(hub.requests)
        assert ask("read", listed) == [["secret"], None]
        requests = hub.requests[before:]
    # The storage has its own signature; the token is for the hub alone.
    assert {each.authorized for each in ranges_of(requests, "/resolve/")} == {True}
    assert {each.authorized for each in ranges_of(requests, "/storage/")} == {False}


def test_without_a_hub_there_is_a_connection_error(hub, by_readme, tmp_path):
    for address, offline in (("http://127.0.0.1:9", "0"), (hub.address, "1")):
        with client_of(address, tmp_path, HF_HUB_OFFLINE=offline) as ask:
            _, error = ask("listing", {"repository": "team/readme"})
        assert error.startswith("UnreachableError: dataset team/readme: the hub cannot be")
        assert "\n" not in error


def test_files_of_a_local_folder_stay_where_they_are(by_readme, client, tmp_path):
    for name, data in by_readme.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    # Not read: the limit ends before it.
    (tmp_path / "parts" / "b.parquet").write_bytes(b"damaged")
    listed = list_dataset(HubSource(repository=str(tmp_path), limit=23), tmp_path / "out")
    assert [(Path(one.file.address), one.stop, one.rows) for one in listed] == [
        (tmp_path / "zeta.parquet", None, None),
        (tmp_path / "parts" / "a b#1.parquet", 1, 3),
    ]
    assert client("read", [one.model_dump() for one in listed])[0] == TEXTS[:23]
    zeta = listed[0].file
    assert zeta.fingerprint == f"sha256:{sha256(by_readme.files['zeta.parquet'])}"
    assert zeta.version == local_version((tmp_path / "zeta.parquet").stat())
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read: "):
        list_dataset(HubSource(repository=str(tmp_path), limit=31), tmp_path / "out")
    with pytest.raises(DataError, match="has no split 'dev'; it has: train, validation, test"):
        list_dataset(HubSource(repository=str(tmp_path), split="dev"), tmp_path / "out")
