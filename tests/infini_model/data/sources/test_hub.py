"""Of the Hugging Face hub: the files of datasets, tokenizers and weights, each fetched once."""

import contextlib
import csv
import gzip
import io
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import local_file, make_texts, rows_of, write_parquet
from local_hub import TOKEN, Repository, git_id, serve_hub, sha256

from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.files import hub_errors
from infini_model.data.sources.formats import content_of
from infini_model.data.sources.hub import first_rows
from infini_model.data.sources.rows import Reading
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime.fact_cache import FactCache

# A process of its own, since the hub's address is read when its package is imported. It answers a
# line of JSON with another; pauses between retries are left out.
CLIENT = """
import contextlib, json, logging, os, pathlib, sys, tempfile, time
from infini_model.config import DataConfig, HubSource
from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.files import SourceFile, fingerprint
from infini_model.data.sources.formats import read_range, whole_file
from infini_model.data.sources.rows import Reading
from infini_model.data.sources.hub import fetch_weights, list_dataset
from infini_model.data.tokenizers import trained
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.trained import TokenizerStore
from infini_model.runtime.fact_cache import FactCache

time.sleep = lambda seconds: None
trained.SAMPLE_BYTES = 200_000

def login(token):
    os.environ["HF_TOKEN"] = token

def ranges_of(files):
    rows = [file.pop("rows", None) for file in files]
    ranges = [whole_file(SourceFile(**file)) for file in files]
    cuts = ({"rows": most, "whole": most is None} for most in rows)
    return [part.model_copy(update=cut) for part, cut in zip(ranges, cuts, strict=True)]

def texts_of(ranges):
    arrays = (array for part in ranges for array in read_range(part, Reading()))
    return [text for array in arrays for text in array.to_pylist()]

def read(files):
    return texts_of(ranges_of(files))

def partitions(files, column="text"):
    facts = FactCache(pathlib.Path(tempfile.mkdtemp()) / "kept.json")
    return plan_partitions(ranges_of(files), Reading(column), 200_000, facts)

def plan(*arguments):
    return len(partitions(*arguments))

def read_in_parts(files):
    return [texts_of(partition.ranges) for partition in partitions(files)]

def warnings(source):
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("infini_model").addHandler(handler)
    listing(source)
    logging.getLogger("infini_model").removeHandler(handler)
    return messages

def listing(source):
    facts = FactCache(pathlib.Path(tempfile.mkdtemp()) / "kept.json")
    found = list_dataset(HubSource(**source))
    files = fingerprint([one.file for one in found], facts)
    rows = [{"rows": one.rows} if one.rows else {} for one in found]
    return [file.model_dump() | most for file, most in zip(files, rows, strict=True)]

def train(files):
    folder = pathlib.Path(tempfile.mkdtemp())
    config = DataConfig(tokenizer={"spec": "train", "vocab_size": 260})
    places = [(Reading(), [part]) for part in ranges_of(files)]
    tokenizer, _ = trained.dataset_tokenizer(places, config, TokenizerStore(folder))
    return tokenizer.vocab_size

def stream(repository, split):
    import datasets
    rows = datasets.load_dataset(repository, split=split, streaming=True)
    return [row["text"] for row in rows]

def fetch(source):
    return read(listing(source))

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
        for split in ("train", "validation", "validation + train", "all"):
            listed, _ = ask("listing", {"repository": name, "split": split})
            assert ask("read", listed)[0] == ask("stream", name, split)[0]


def test_a_file_is_named_by_commit_and_identified_without_reading_it(repository, of_lines, ask):
    (zeta, first, _), requests = ask("listing", SOURCE)
    assert zeta == {
        "address": f"hf://datasets/team/data@{repository.commit}/zeta.parquet",
        "bytes": len(repository.files["zeta.parquet"]),
        "fingerprint": f"sha256:{sha256(repository.files['zeta.parquet'])}",
        "version": repository.commit,
    }
    assert first["address"].endswith("/parts/a b#1.parquet")
    assert not ranges_of(requests, ".parquet")
    (one,), _ = ask("listing", {"repository": "team/lines", "split": "validation"})
    small = of_lines.files["validation/c.jsonl"]
    assert one["fingerprint"] == f"git:{git_id(small)}"


def test_a_limit_is_a_prefix_in_file_order(repository, ask):
    # At and around the ends of row groups and of files.
    for limit in (6, 7, 20, 21, 61):
        assert ask("fetch", SOURCE | {"limit": limit})[0] == TEXTS[:limit]


@pytest.fixture(scope="module")
def large(hub):
    """Two files of 6 MB, in row groups of 500 kB."""
    files = {f"{name}.parquet": parquet([name * 1000] * 6000, 500) for name in "ab"}
    hub.repositories["team/large"] = Repository(files)
    return {"repository": "team/large"}


def sent(requests):
    return sum(each.sent for each in ranges_of(requests, "/storage/"))


def test_planning_fetches_footers_and_reading_each_file_once(large, ask):
    listed, _ = ask("listing", large)
    assert sent(ask("plan", listed)[1]) < 200_000
    read, requests = ask("read", listed[:1])
    assert read == ["a" * 1000] * 6000
    assert sent(requests) == listed[0]["bytes"]
    assert ask("read", listed[:1]) == (read, [])


def test_a_tokenizer_is_trained_without_fetching_what_it_does_not_read(hub, ask):
    files = {"a.parquet": parquet(["some words"] * 60_000, 2000)}
    files["b.jsonl.gz"] = gzip.compress(lines([os.urandom(500).hex() for _ in range(20_000)]))
    for name, content in files.items():
        hub.repositories["team/sampled"] = Repository({name: content})
        listed, _ = ask("listing", {"repository": "team/sampled"})
        size, requests = ask("train", listed)
        assert size == 260
        assert sent(requests) < len(content) / 2


def test_a_limit_does_not_fetch_the_rest(large, ask):
    read, requests = ask("fetch", large | {"limit": 150})
    assert read == ["a" * 1000] * 150
    assert sent(requests) < 1_000_000
    # Of several ranges, too, those that are needed alone.
    listed, _ = ask("listing", large | {"limit": 7750})
    parts, requests = ask("read_in_parts", listed[1:])
    assert parts == [*[["b" * 1000] * 500] * 3, ["b" * 1000] * 250]
    assert sent(requests) < 2_500_000


@pytest.mark.parametrize("failure", ["cuts", "busy"])
def test_a_file_is_fetched_though_the_hub_fails_at_times(hub, ask, client, failure):
    hub.repositories["team/failing"] = Repository({"a.parquet": parquet(["x" * 1000] * 200)})
    listed, _ = ask("listing", {"repository": "team/failing"})
    setattr(hub, failure, 1000)
    for command in ("plan", "read"):
        _, error = client(command, listed)
        assert error.startswith(f"UnreachableError: {listed[0]['address']}: the hub cannot be ")
        assert "hf_" not in error
    for files, rows in ((listed, 200), ([listed[0] | {"rows": 9}], 9)):
        setattr(hub, failure, 3)
        assert ask("read", files)[0] == ["x" * 1000] * rows
        assert not getattr(hub, failure)


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
    file = listed[0]
    for old, new, reason in (
        ("held_out", "gone", "not found (HTTP 404)"),
        (repository.commit, "0" * 40, "has no such revision (HTTP 404)"),
        (NAME, "team/gone", "does not exist on the hub, or is private"),
    ):
        address = file["address"].replace(old, new)
        _, error = client("read", [file | {"address": address}])
        assert error.startswith(f"DataError: {address}: {reason}")


def test_what_does_not_exist_is_named_in_one_line(hub, repository, client):
    choice = b"---\nconfigs:\n- config_name: a\n- config_name: b\n---\n"
    hub.repositories["team/choice"] = Repository({"README.md": choice, "a.parquet": b""})
    hub.repositories["team/damaged"] = Repository({"train.parquet": b"PAR1" + b"x" * 100})
    torn = b"PAR1" + b"x" * 100 + (50).to_bytes(4, "little") + b"PAR1"
    hub.repositories["team/torn"] = Repository({"train.parquet": torn})
    for fields, complaint in (
        ({"repository": "team/gone"}, "team/gone: does not exist on the hub, or is private"),
        ({"revision": "v9"}, "dataset team/data: has no revision 'v9'; it has: main"),
        ({"configuration": "other"}, "'other' not found. Available: ['main', 'lines']"),
        ({"repository": "team/choice"}, "pick one among the available configs: ['a', 'b']"),
        ({"split": "dev"}, "has no split 'dev'; it has: train, validation"),
        ({"split": "train+dev"}, "data.source.split: dataset team/data: has no split 'dev'; it"),
        (
            {"split": "train[:9]"},
            "no split 'train[:9]'; it has: train, validation; data.source.lim",
        ),
        ({"column": "article", "limit": 5}, "has no column 'article'; it has: text, number, noise"),
        ({"repository": "team/damaged"}, "train.parquet: "),
        ({"repository": "team/damaged", "limit": 5}, "train.parquet: "),
        ({"repository": "team/torn"}, "train.parquet: "),
        ({"repository": "team/torn", "limit": 5}, "train.parquet: "),
    ):
        source = SOURCE | fields
        listed, error = client("listing", source)
        if error is None:
            _, error = client("plan", listed, source.get("column", "text"))
        assert error.startswith("DataError: ")
        assert complaint in error


CONVERTED = "refs/convert/parquet"


@pytest.fixture(scope="module")
def of_tables(hub):
    """Texts in formats that are not read as they are, and in the hub's copy."""
    card = b"""---
configs:
- config_name: default
  data_files: [{split: train, path: train.csv}, {split: test, path: test.csv}]
- config_name: other
  data_files: train.csv
  sep: "|"
---
"""
    copy = {
        "default/test/0000.parquet": parquet(TEXTS[40:]),
        "default/train/0000.parquet": parquet(TEXTS[:30], 7),
        "default/train/0001.parquet": parquet(TEXTS[30:40]),
        "other/train/0000.parquet": parquet(["other"]),
    }
    files = {"README.md": card, "train.csv": table(TEXTS[:40]), "test.csv": table(TEXTS[40:])}
    older = files | {"train.csv": table(["older"])}
    hub.repositories["team/tables"] = Repository(
        files, refs={CONVERTED: copy, "refs/tags/old": older}
    )
    return hub.repositories["team/tables"]


def table(texts):
    out = io.StringIO()
    csv.writer(out).writerows([["text"], *([text] for text in texts)])
    return out.getvalue().encode()


def test_what_is_not_read_as_it_is_is_read_from_the_copy_of_the_hub(of_tables, ask):
    source = {"repository": "team/tables"}
    for split in ("train", "test", "test+train", "all"):
        listed, requests = ask("listing", source | {"split": split})
        assert ask("read", listed)[0] == ask("stream", "team/tables", split)[0]
        assert not ranges_of(requests, ".csv")
        commit = of_tables.at(CONVERTED).commit
        assert all(f"team/tables@{commit}/default/" in each["address"] for each in listed)
    for limit in (3, 30, 35, 45):
        read, _ = ask("fetch", source | {"split": "all", "limit": limit})
        assert read == TEXTS[:limit]
    assert ask("fetch", source | {"configuration": "other"})[0] == ["other"]
    # The newest commit may be named.
    for revision in ("main", of_tables.commit):
        assert ask("fetch", source | {"revision": revision})[0] == TEXTS[:40]


def test_a_limit_of_json_lines_is_read_from_the_copy_of_the_hub(hub, ask):
    copy = {"default/train/0000.parquet": parquet(TEXTS)}
    files = {"train.jsonl": lines(TEXTS)}
    hub.repositories["team/cut"] = Repository(files, refs={CONVERTED: copy})
    read, requests = ask("fetch", {"repository": "team/cut", "limit": 5})
    assert read == TEXTS[:5]
    assert not ranges_of(requests, ".jsonl")


def test_a_copy_of_the_first_part_is_warned_about(of_tables, hub, ask):
    copy = {"default/partial-train/0000.parquet": parquet(["first"])}
    files = {"train.csv": table(["first", "second"])}
    hub.repositories["team/partial"] = Repository(files, refs={CONVERTED: copy})
    source = {"repository": "team/partial"}
    assert ask("fetch", source)[0] == ["first"]
    (warning,), _ = ask("warnings", source)
    assert warning.startswith(
        "dataset team/partial: the hub has converted only the first part of split 'train' to "
    )
    assert ask("warnings", {"repository": "team/tables"})[0] == []


def test_without_a_copy_there_is_an_error_in_one_line(of_tables, hub, client):
    unconverted = {"repository": "team/unconverted"}
    hub.repositories["team/unconverted"] = Repository({"train.csv": table(["text"])})
    other = {"default/test/0000.parquet": parquet(["text"])}
    copies = {"copy": other, "empty": {"README.md": b""}}
    for name, copy in copies.items():
        files = {"train.jsonl": lines(["text"])}
        hub.repositories[f"team/{name}"] = Repository(files, refs={CONVERTED: copy})
    for source, complaint in (
        (unconverted, "and the hub has no Parquet copy of default/train: download its files and"),
        ({"repository": "team/copy", "limit": 1}, "the hub has no Parquet copy of default/train"),
        ({"repository": "team/empty", "limit": 1}, "the hub has no Parquet copy of default/train"),
        ({"repository": "team/tables", "revision": "old"}, "the newest data.source.revision alone"),
    ):
        _, error = client("listing", source)
        assert error.startswith(f"DataError: dataset {source['repository']}: is read in place only")
        assert complaint in error


def test_a_gated_dataset_needs_a_token_that_no_message_shows(hub, client, ask):
    gated = Repository({"train.parquet": parquet(["secret"])}, gated=True)
    hub.repositories["team/gated"] = gated
    address, source = f"hf://datasets/team/gated@{gated.commit}/train.parquet", "team/gated"
    file = {"address": address, "bytes": 9, "fingerprint": "", "version": ""}
    for token in ("", "hf_wrong"):
        client("login", token)
        _, error = client("listing", {"repository": source})
        assert error.startswith("DataError: dataset team/gated: ")
        _, refused = client("read", [file])
        assert refused.startswith(f"DataError: {address}: is gated: ask for access")
        assert "hf_wrong" not in error + refused
    client("login", TOKEN)
    listed, _ = ask("listing", {"repository": source})
    read, requests = ask("read", listed)
    client("login", "")
    assert read == ["secret"]
    # The storage has its own signature; the token is for the hub alone.
    for place, authorized in (("/resolve/", True), ("/storage/", False)):
        assert {each.authorized for each in requests if place in each.path} == {authorized}


@pytest.mark.parametrize("error", [KeyError("text"), ValueError("wrong"), RuntimeError("bug")])
def test_an_error_that_the_hub_has_no_part_in_is_not_the_users(error):
    with pytest.raises(type(error)) as caught, hub_errors("dataset team/data"):
        raise error
    assert caught.value is error


def test_of_parquet_files_those_with_the_first_rows_are_read_in_parts(tmp_path):
    listed = []
    for number in range(3):
        texts = TEXTS[number * 20 : number * 20 + 20]
        path = write_parquet(tmp_path / f"train-{number}.parquet", texts, row_group_size=3)
        listed.append(local_file(path))

    def planned(limit):
        files = first_rows(listed, limit)
        parts = plan_partitions(files, Reading(), 300, FactCache(tmp_path / "kept.json"))
        texts = rows_of(*(part for each in parts for part in each.ranges))
        assert sorted(texts) == sorted(rows_of(*files)) == sorted(TEXTS[:limit])
        return {content_of(part) for each in parts for part in each.ranges}

    whole = planned(None)
    assert len(whole) > 3
    for limit in (1, 20, 21, 40, 41, 44, 59, 60, 1000):
        # What is added by a larger limit is all that is new.
        assert len(planned(limit) - whole) == (limit not in (20, 40, 60, 1000))


def test_a_tokenizer_is_fetched_or_named(hub, ask, client):
    trained = train_tokenizer([TEXTS], 280)
    for name, files in (
        ("llama", {"tokenizer.json": trained.text.encode()}),
        ("bytes", {"config.json": b'{"infini_tokenizer": "bytes"}'}),
        ("none", {"config.json": b"{}"}),
    ):
        hub.repositories[f"team/{name}"] = Repository(files)
    assert ask("tokenizer", "team/llama")[0] == trained.fingerprint
    assert ask("tokenizer", "team/bytes")[0] == ByteTokenizer.fingerprint
    assert client("tokenizer", "team/gone")[1].startswith("DataError: tokenizer team/gone: ")
    assert client("tokenizer", "team/none")[1] == "DataError: team/none: has no tokenizer.json"


WEIGHTS = {f"model-{number}-of-3.safetensors": os.urandom(40_000 + number) for number in range(3)}
WEIGHTS["config.json"] = b"{}"
# Neither a pickle nor a copy of the weights is fetched.
OTHERS = {"model.bin": b"pickle", "original/consolidated.safetensors": b"a copy"}


def test_weights_are_fetched_once(hub, ask):
    hub.repositories["team/weights"] = Repository(WEIGHTS | OTHERS)
    commit, total = hub.repositories["team/weights"].commit, sum(map(len, WEIGHTS.values()))
    (name, seen), _ = ask("weights", "team/weights", commit)
    assert seen == sorted(seen)
    assert len(seen) == len(WEIGHTS)
    assert seen[-1] == [total, total]
    assert ask("weights", "team/weights", commit)[0] == [name, []]
