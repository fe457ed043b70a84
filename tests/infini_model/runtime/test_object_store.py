"""An object store survives what a network does to it, and says what it cannot survive."""

import glob
import hashlib
import logging
import os
import pickle
import random
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from commands import PATIENCE, eventually
from s3_server import CREDENTIALS, LISTED_AT_ONCE

from infini_model.runtime import object_store, store_client
from infini_model.runtime.errors import (
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.object_store import ObjectStore, Version, matching

CONTENT = random.Random(5).randbytes(3_000_000)
LEAST_PART = 5 << 20  # bytes; S3 takes none smaller, but the last


@pytest.fixture
def store(bucket) -> ObjectStore:
    return ObjectStore(f"{bucket}/some/prefix", PATIENCE)


@pytest.fixture
def small_requests(monkeypatch):
    """Requests and parts so small that a small object takes several."""
    monkeypatch.setattr(object_store, "REQUEST_BYTES", 400_000)
    monkeypatch.setattr(object_store, "READ_AHEAD_BYTES", 1 << 14)


def reading(store, key):
    found = store.find(key)
    return store.open(key, found.bytes, found.version)


def keys(store, *below):
    return [each.key for each in store.list_below(*below)]


@pytest.mark.parametrize("key", ["a", "b/c d", "ü#%20&+=~.txt", "q*[x]?"])
def test_what_is_written_is_found_read_listed_and_deleted(store, bucket, key):
    version = store.write(key, b"one")
    assert store.read(key) == (b"one", version)
    found = store.find(key)
    assert (found.address, found.key) == (f"{bucket}/some/prefix/{key}", key)
    assert (found.bytes, found.version) == (3, version)
    assert store.list_below() == [found]
    assert store.write(key, b"two") != version
    store.delete([key, "never written"])
    assert store.find(key) is None
    with pytest.raises(ObjectMissingError, match="not found"):
        store.read(key)


def test_a_folder_is_listed_without_its_namesakes_and_markers(store, s3, bucket):
    for key in ("a/1", "a/b/2", "ab/3", "a0"):
        store.write(key, b"x")
    markers = ["some/", "some/prefix/", "some/prefix/a/", "some/prefix/a/b/"]
    for key in markers:
        s3.client().put_object(Bucket=bucket[5:], Key=key, Body=b"")
    assert ObjectStore(bucket).list_below()[0].key == "some/prefix/a/1"
    assert keys(store, "a") == ["a/1", "a/b/2"]
    assert keys(store) == ["a/1", "a/b/2", "a0", "ab/3"]
    store.delete(keys(store, "a"))
    for key in markers[2:]:
        s3.client().delete_object(Bucket=bucket[5:], Key=key)
    assert keys(store) == ["a0", "ab/3"]
    assert keys(ObjectStore(f"{bucket}/other")) == []


NAMES = (
    *("a.txt", "b.md", "x/a.txt", "x/y/c.txt"),
    *("x/y/.h.txt", ".d/e.txt", "x/.g/e.txt", "xy/[1].txt"),
)
PATTERNS = (
    *("*", "*.txt", "**", "**/*.txt", "x/**/*.txt", "x/*/c.txt", "x/**", "**/y/*", "[ab].*"),
    *(
        ".d/*",
        "**/.*",
        "x*/*",
        "x/**.txt",
        "**/.*/*",
        "xy/[[]1].txt",
        "?.txt",
        "x/y/**/**/c.txt",
        "nothing/*",
        "a.txt",
    ),
)


def test_a_glob_matches_what_it_matches_on_a_disk(bucket, tmp_path):
    store = ObjectStore(f"{bucket}/root")
    for name in NAMES:
        store.write(name, b"x")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for pattern in PATTERNS:
        local = glob.glob(pattern, root_dir=tmp_path, recursive=True)  # noqa: PTH207
        expected = sorted(name for name in local if (tmp_path / name).is_file())
        found = [each.address for each in matching(f"{bucket}/root/{pattern}")]
        assert found == [f"{bucket}/root/{name}" for name in expected], pattern


def test_only_one_of_many_creates_an_object(store):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda name: store.write_if("lease", b"%d" % name, None), range(16)))
    (winner,) = [number for number, version in enumerate(made) if version is not None]
    assert store.read("lease") == (b"%d" % winner, made[winner])


def test_compare_and_swap(store):
    first = store.write_if("lease", b"1", None)
    second = store.write_if("lease", b"2", first)
    assert second is not None
    assert store.write_if("lease", b"3", first) is None
    assert store.read("lease") == (b"2", second)
    store.delete(["lease"])
    assert store.write_if("lease", b"3", second) is None
    assert store.find("lease") is None


@pytest.mark.parametrize("size", [0, 1 << 20, 12_000_000])
def test_files_go_up_and_come_back(store, tmp_path, monkeypatch, small_requests, size):
    monkeypatch.setattr(object_store, "PART_BYTES", LEAST_PART)
    there, back = tmp_path / "there", tmp_path / "folder" / "back"
    content = (CONTENT * 4)[:size]
    there.write_bytes(content)
    version = store.upload("file", there)
    assert store.find("file").version == version
    digest = hashlib.sha256(content).hexdigest()
    store.download("file", back, digest)
    assert back.read_bytes() == content
    with pytest.raises(StoreError, match=r"file: is damaged: SHA-256"):
        store.download("file", tmp_path / "other", "0" * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there"]
    # A missing local file is no failure of the store.
    with pytest.raises(FileNotFoundError):
        store.upload("file", tmp_path / "gone")


def test_an_open_object_is_read_at_any_position(store, small_requests):
    store.write("o", CONTENT)
    draw = random.Random(7)
    with reading(store, "o") as file:
        assert file.size() == len(CONTENT)
        for _ in range(20):
            start = file.seek(draw.randrange(len(CONTENT)))
            for size in (draw.randrange(9), draw.randrange(1 << 16)):
                assert file.read(size) == CONTENT[start : start + size]
                start += size


def test_an_overwritten_object_is_not_read_as_the_old_one(store, small_requests):
    store.write("o", CONTENT)
    with reading(store, "o") as file:
        file.read(10)
        store.write("o", CONTENT[::-1])
        with pytest.raises(ObjectChangedError, match=r"/o: changed while it was read; run again"):
            file.read(1 << 20)
    with reading(store, "o") as file:
        store.delete(["o"])
        with pytest.raises(ObjectMissingError, match="/o: not found"):
            file.read(10)
    with pytest.raises(ObjectMissingError):
        store.open("o", 0, Version(None))


# Where an answer is cut: in its head, at the start of its content, far inside.
@pytest.mark.parametrize("count", [50, 1_000, 300_000])
def test_a_connection_that_is_cut_within_an_answer(store, s3, tmp_path, small_requests, count):
    store.write("o", CONTENT)
    found = store.find("o")
    s3.line.cut_after(count)
    with store.open("o", found.bytes, found.version) as file:
        assert file.read() == CONTENT
    s3.line.cut_after(count)
    store.download("o", tmp_path / "o", hashlib.sha256(CONTENT).hexdigest())
    for number in range(LISTED_AT_ONCE):
        store.write(f"{number}", b"")
    s3.line.cut_after(min(count, 2_000))
    assert len(store.list_below()) == LISTED_AT_ONCE + 1


def test_a_conditional_put_whose_answer_is_lost_has_succeeded(store, s3):
    """The store accepts it, the connection breaks, and the repetition finds its own object."""
    s3.line.cut_after(10)
    version = store.write_if("o", b"mine", None)
    assert store.read("o") == (b"mine", version)
    s3.line.cut_after(10)
    second = store.write_if("o", b"mine again", version)
    assert store.read("o") == (b"mine again", second)
    s3.line.cut_after(10)
    assert store.write_if("o", b"another's", None) is None


def test_an_upload_that_is_cut_ends_whole_without_parts(store, s3, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", LEAST_PART)
    (tmp_path / "file").write_bytes(CONTENT * 4)
    for count in (10, 200, 700):
        s3.line.cut_after(count)
        store.upload("file", tmp_path / "file")
        assert store.find("file").bytes == len(CONTENT) * 4
    # An upload of which the store's first answer is lost stays open, but empty.
    amazon, of = s3.client(), {"Bucket": bucket[5:]}
    for each in amazon.list_multipart_uploads(**of).get("Uploads", []):
        open_one = of | {"Key": each["Key"], "UploadId": each["UploadId"]}
        assert "Parts" not in amazon.list_parts(**open_one)


def test_a_server_that_falls_silent(store, s3, monkeypatch):
    store.write("o", CONTENT)

    def asked_in_silence(request):
        """The result of a request that is answered only after it has been tried again."""
        with ThreadPoolExecutor(1) as pool:
            with monkeypatch.context() as patch, s3.line.silent():
                patch.setattr(store_client, "SILENT_TIMEOUT", timedelta(seconds=0.3))
                store_client._make_client.cache_clear()
                tries = s3.line.accepted + 2
                asked = pool.submit(request)
                eventually(lambda: s3.line.accepted >= tries, "another try")
                patch.undo()
                store_client._make_client.cache_clear()
            return asked.result(PATIENCE)

    with reading(store, "o") as file:
        assert asked_in_silence(file.read) == CONTENT
    assert asked_in_silence(lambda: keys(store)) == ["o"]
    made = asked_in_silence(lambda: store.write_if("p", b"mine", None))
    assert store.read("p") == (b"mine", made)


@pytest.mark.parametrize("patience", [0.0, 0.3])
def test_a_server_that_stays_away_is_named_after_a_while(bucket, s3, patience):
    version = ObjectStore(f"{bucket}/x").write("o", CONTENT)
    store = ObjectStore(f"{bucket}/x", patience)
    with s3.line.gone():
        reading = store.open("o", len(CONTENT), version)
        for request in (*each_request(store), reading.read):
            with pytest.raises(UnreachableError) as caught:
                request()
            assert isinstance(caught.value, ConnectionError)
            assert f"{bucket}/x" in str(caught.value)
            assert str(caught.value).endswith("cannot be reached: connection refused")


def each_request(store):
    """Requests of most kinds."""
    yield lambda: store.read("o")
    yield lambda: store.find("o")
    yield lambda: store.list_below()
    yield lambda: store.write("o", b"")
    yield lambda: store.write_if("o", b"", None)
    yield lambda: store.delete(["o"])


def told(caught, caplog):
    """All that a log could show of an error."""
    return "".join(traceback.format_exception(caught.value)) + caplog.text + repr(caught.value)


def test_what_is_final_is_one_line_at_once(bucket, s3, caplog):
    caplog.set_level(logging.DEBUG)
    store, nowhere = ObjectStore(f"{bucket}/x"), ObjectStore("s3://no-such-bucket/x")

    def check(requests, reason):
        for request in requests:
            with pytest.raises(StoreError, match=rf"^s3://\S+/x\S*: .*{reason}") as caught:
                request()
            assert "\n" not in str(caught.value)
            assert not any(secret in told(caught, caplog) for secret in CREDENTIALS.values())

    check(each_request(nowhere), "no such bucket")
    check([lambda: nowhere.upload("o", Path(__file__))], "no such bucket")
    with s3.refusing():
        check(each_request(store), "access denied .*check the credentials")
        check([lambda: store.upload("o", Path(__file__))], "access denied .*check the credentials")
        check([lambda: store.write_if("o", b"", Version('"e"'))], "access denied")
    check([lambda: store.read("o"), lambda: store.download("o", Path("never"))], "not found")
    check([lambda: store.read("a//b"), lambda: store.write("../b", b"")], "empty or dotted")


def test_no_secret_is_told_however_a_request_fails(bucket, s3, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    store = ObjectStore(bucket, patience=0.2)
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://user:{secret}@127.0.0.1:9"),
        ("AWS_ENDPOINT_URL", secret),
        ("AWS_ENDPOINT_URL", f"https://user:{secret}@127.0.0.1:{s3.line.port}"),
        ("AWS_ALLOW_HTTP", "false"),
        ("AWS_SECRET_ACCESS_KEY", None),
    ):
        with monkeypatch.context() as patch:
            patch.delenv(name, raising=False)
            if value is not None:
                patch.setenv(name, value)
            with pytest.raises((UserError, UnreachableError)) as caught:
                store.find("o")
        assert not any(each in told(caught, caplog) for each in CREDENTIALS.values()), name
        assert "\n" not in str(caught.value)
    assert not any(value.encode() in pickle.dumps(store) for value in CREDENTIALS.values())


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("s3://KEY:sEcReT@bucket/key", "holds credentials; put them into the environment"),
        ("az://container/key?sv=2024&sig=sEcReT", "holds credentials"),
        ("s3://bucket/key?X-Amz-Signature=sEcReT", "holds credentials"),
        ("ftp://user:sEcReT@host/file", "unknown kind of address; takes s3:// gs:// az://"),
        ("s3://", "names no bucket"),
        ("s3://buck*/key", "names no bucket"),
        ("s3://bucket/a//b", "empty or dotted folder name"),
        ("s3://bucket/../b", "empty or dotted folder name"),
    ],
)
def test_a_wrong_address_is_refused(address, complaint):
    for use in (ObjectStore, matching):
        with pytest.raises(StoreError, match=complaint) as caught:
            use(address)
        assert "sEcReT" not in str(caught.value)


def test_a_forked_process_is_told_rather_than_left_hanging(store):
    store.write("o", b"")
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.read("o")
        except RuntimeError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"spawn the process instead" in os.read(reads, 1000)


def test_without_obstore_the_address_is_named(bucket, monkeypatch):
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    with pytest.raises(UserError, match=rf"{bucket}: needs obstore: pip install obstore"):
        ObjectStore(bucket).find("o")


# In the middle of the import, when its module `store` is there and the rest is not.
IMPORTING = """
import sys, threading, traceback
from infini_model.runtime.store_client import _make_client

got, threads = [], []

def second():
    _make_client("s3://bucket", 0.0, ())
    got.append("head" in vars(sys.modules["obstore"]))

def trace(frame, event, _):
    if not frame.f_code.co_filename.endswith("obstore/__init__.py"):
        return None
    if event == "line" and "store" in frame.f_globals:
        sys.settrace(None)
        frame.f_trace = None
        thread = threading.Thread(target=second)
        threads.append(thread)
        thread.start()
        # Until it is done, or waits for this import.
        while thread.is_alive():
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
            if any(each.name == "acquire" and "importlib" in each.filename for each in stack):
                break
        return None
    return trace

sys.settrace(trace)
import obstore
threads[0].join()
sys.exit(got != [True])
"""


def test_a_thread_waits_until_another_one_has_imported_all_of_obstore() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING], check=True)
