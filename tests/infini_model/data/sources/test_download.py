"""The files of a source are listed by what identifies their content; what is remote comes once."""

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import build, files_config, make_texts, write_files
from local_hub import LocalHub, Repository, serve_hub

from infini_model.config import DataConfig, FilesSource, SplitsConfig
from infini_model.data.sources import files
from infini_model.data.sources.files import SourceFile
from infini_model.data.sources.listing import list_files, list_objects, list_sources
from infini_model.data.sources.text import hash_documents, splits_of
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UnreachableError, UserError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.object_store import ObjectStore


def files_of(output_dir: Path, *patterns: object) -> list[SourceFile]:
    return [part.file for part in list_sources(files_config(*patterns), output_dir).ranges]


def test_a_file_is_read_again_only_if_it_was_written(tmp_path, monkeypatch):
    read, sha256 = [], storage.sha256

    def listed():
        read.clear()
        return files_of(tmp_path, raw / "*.txt")

    monkeypatch.setattr(
        storage, "sha256", lambda path: read.append(Path(path).name) or sha256(path)
    )
    raw = write_files(tmp_path / "raw", ["a", "b"])
    # Written so recently that another write might not change the time of modification.
    monkeypatch.setattr(files, "SETTLED_NANOSECONDS", 10**18)
    first = listed()
    assert (listed(), read) == (first, ["0000.txt", "0001.txt"])
    monkeypatch.setattr(files, "SETTLED_NANOSECONDS", -1)
    assert listed() == first
    assert (listed(), read) == (first, [])
    stat = (raw / "0001.txt").stat()
    (raw / "0001.txt").write_text("c")
    # A program may restore the time of modification, but not that of the change.
    os.utime(raw / "0001.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = listed()
    assert (second[0], read) == (first[0], ["0001.txt"])
    assert second[1].fingerprint != first[1].fingerprint
    (tmp_path / "datasets" / ".facts.json").write_text("{broken")
    fact_cache.cache_clear()
    assert listed() == second


def test_the_hash_of_a_document_alone_decides_its_split():
    texts = pa.array(make_texts(4000, longest=2))
    hashes = hash_documents(texts)
    assert (hashes[5:9] == hash_documents(texts.slice(5, 4))).all()
    splits = splits_of(hashes, SplitsConfig(train=0.5, validation=0.25, test=0.25))
    assert 0.45 < (splits == 0).mean() < 0.55
    assert 0.22 < (splits == 1).mean() < 0.28
    assert set(splits_of(hashes, SplitsConfig(train=1.0, validation=0.0, test=0.0))) == {0}


@pytest.mark.parametrize(
    "patterns", [["raw/000[12].txt", "{here}/raw/*.txt"], ["raw/**/*", "./raw//*.txt", "raw/*"]]
)
def test_each_match_is_listed_once_in_order_from_any_folder(tmp_path, monkeypatch, patterns):
    here = tmp_path / "[ab]*"
    raw = write_files(here / "raw", ["a", "b", "c"])
    monkeypatch.chdir(here)
    escaped = str(here).replace("[", "[[]").replace("*", "[*]")
    source = FilesSource(paths=[pattern.replace("{here}", escaped) for pattern in patterns])
    assert list_files(source, tmp_path) == [str(raw / f"000{number}.txt") for number in range(3)]


def test_a_folder_is_read_once_whatever_links_lead_to_it(tmp_path):
    raw = write_files(tmp_path / "raw", ["a", "b"])
    deep = write_files(raw / "deep" / "er", ["c"])
    outside = write_files(tmp_path / "outside", ["d"])
    for link, target in (("self", "."), ("deep/up", ".."), ("alias", deep), ("linked", outside)):
        (raw / link).symlink_to(target)
    # Folders that only a link leads to are read.
    everything = [raw / "0000.txt", raw / "0001.txt", deep / "0000.txt", raw / "linked/0000.txt"]
    for pattern in ("raw/**/*.txt", "raw/**", "raw/**/**/*.txt"):
        source = FilesSource(paths=[str(tmp_path / pattern)])
        assert list_files(source, tmp_path) == sorted(map(str, everything))
    # Two links to each other's folder.
    for one, other in (("a", "b"), ("b", "a")):
        write_files(tmp_path / "ring" / one, [one])
        (tmp_path / "ring" / one / "next").symlink_to(f"../{other}")
    assert len(list_files(FilesSource(paths=[str(tmp_path / "ring/**/*.txt")]), tmp_path)) == 2
    assert len(list_files(FilesSource(paths=[str(raw / "*" / "*.txt")]), tmp_path)) == 4


def test_what_exists_under_the_name_of_a_glob_is_meant(tmp_path, bucket):
    folder = write_files(tmp_path / "br [2024]", ["a", "b"])
    write_files(tmp_path / "br 2", ["c"])
    for name in ("0000.txt", "*.txt", "**/0000.txt"):
        found = list_files(FilesSource(paths=[f"{folder}/{name}"]), tmp_path)
        assert found == sorted(map(str, folder.glob(name)))
    with pytest.raises(DataError, match=r"it is a folder: write .*/br \[\[\]2024\]/\*\*/\*\.txt$"):
        list_files(FilesSource(paths=[str(folder)]), tmp_path)
    ObjectStore(bucket).write("br [2024]/a.txt", b"a")
    assert [each.bytes for each in list_objects(f"{bucket}/br [2024]/a.txt")] == [1]
    with pytest.raises(DataError, match=r"folder: write .*/br \[\[\]2024\]/\*\*/\*\.txt$"):
        list_objects(f"{bucket}/br [2024]")


def test_a_name_that_is_not_utf8_is_told_and_keeps_no_other_file_out(tmp_path, caplog):
    write_files(tmp_path / "raw", ["a", "b"])
    for name in (b"caf\xe9.txt", b"\xe9t\xe9/c.txt"):
        path = Path(os.fsdecode(bytes(tmp_path / "raw") + b"/" + name))
        path.parent.mkdir(exist_ok=True)
        path.write_text("c")
    paths = [str(tmp_path / "raw" / "**")]
    told = "caf\\xe9.txt: the name is not UTF-8; rename it"
    with pytest.raises(DataError, match=re.escape(told) + "$"):
        list_files(FilesSource(paths=paths), tmp_path)
    source = FilesSource(paths=paths, errors="skip")
    assert len(list_sources(DataConfig(source=source), tmp_path).ranges) == 2
    assert caplog.messages[-1].endswith("\\xe9t\\xe9/c.txt: left out, as the name is not UTF-8")


def test_the_standard_library_excludes_installed_packages(tmp_path):
    found = list_files(FilesSource(paths=["{stdlib}/**/*.py"]), tmp_path)
    assert str(Path(sysconfig.get_path("stdlib"), "json", "decoder.py")) in found
    assert not [name for name in found if "site-packages" in Path(name).parts]


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("{here}/*.txt", r"'.*\*\.txt' matches no file$"),
        ("{here}", r"matches no file; it is a folder: write .*/\*\*/\*\.txt$"),
        ("~nobody-here/*.txt", r"'~nobody-here/\*\.txt' matches no file$"),
        ("{here}/image.png", r"image\.png: unsupported format; supported: \.txt"),
        ("{here}/short/*", r"0\.TXT and 1 more: no documents left: 2 of 2 .*min_characters"),
        ("{here}/latin.md", r"latin\.md: is not UTF-8"),
        ("nonsense://a/b.txt", r"nonsense://a/b\.txt: cannot be read"),
        ("{bucket}/texts/*.txt", r"data\.source\.paths: '.*txt' matches no object$"),
        ("{bucket}/texts", r"no object; it is a folder: write s3:.*/texts/\*\*/\*\.txt$"),
        ("{bucket}/texts/a.zip", r"a\.zip: unsupported format; supported: \.txt"),
        ("s3://no-such-bucket/*", "s3://no-such-bucket: there is no such bucket"),
    ],
)
def test_what_a_source_lacks_is_named_in_one_line(tmp_path, request, pattern, complaint):
    (tmp_path / "image.png").write_bytes(b"png")
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    write_files(tmp_path / "short", ["", "abc"])
    (tmp_path / "short" / "0000.txt").rename(tmp_path / "short" / "0.TXT")
    pattern = pattern.replace("{here}", str(tmp_path))
    if "{bucket}" in pattern or pattern.startswith("s3:"):
        bucket = request.getfixturevalue("bucket")
        ObjectStore(bucket).write("texts/a.zip", b"zip")
        pattern = pattern.replace("{bucket}", bucket)
    source = FilesSource(paths=[pattern], min_characters=4)
    with pytest.raises(UserError, match=complaint) as caught:
        build(DataConfig(source=source), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_objects_are_listed_by_address_with_the_fingerprints_of_their_content(bucket, tmp_path):
    store, names = ObjectStore(f"{bucket}/texts"), ["a.txt", "b.txt", "deep/er/c.txt"]
    for name in ("d.md", *reversed(names)):
        store.write(name, name.encode())
    listed = list_objects(f"{bucket}/texts/**/*.txt")
    assert [file.address for file in listed] == [f"{bucket}/texts/{name}" for name in names]
    assert files_of(tmp_path, f"{bucket}/texts/a.txt", f"{bucket}/**/a.txt") == listed[:1]
    store.write("a.txt", b"A.txt")
    again = list_objects(f"{bucket}/texts/**/*.txt")
    assert again[1:] == listed[1:]
    assert again[0].fingerprint != listed[0].fingerprint


CONTENT = b"".join(b'{"text": "document %d"}\n' % number for number in range(50_000))


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A server with a file, of which it may send only ranges."""
    with serve_hub() as server:
        files = {"corpus.jsonl": CONTENT, "signed.jsonl.gz": b"on a host with signed addresses"}
        server.repositories["team/data"] = Repository(files)
        yield server


def address_of(hub: LocalHub, name: str = "corpus.jsonl") -> str:
    return f"{hub.address}/datasets/team/data/resolve/main/{name}"


def fetch(hub: LocalHub, output_dir: Path, **options) -> Path:
    (part,) = list_sources(files_config(address_of(hub)), output_dir, **options).ranges
    return Path(part.file.address)


def asked(hub: LocalHub) -> list[str | None]:
    return [each.range for each in hub.requests if each.method == "GET"]


def test_a_file_is_downloaded_once(hub, tmp_path):
    reports = []
    path = fetch(hub, tmp_path, progress=lambda *seen: reports.append(seen))
    assert path.read_bytes() == CONTENT
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert fetch(hub, tmp_path) == path
    # Killed before it was renamed.
    path.rename(path.with_name(path.name + ".partial"))
    assert fetch(hub, tmp_path) == path
    assert asked(hub) == [None]
    hub.repositories["team/data"] = Repository({"corpus.jsonl": b"changed"})
    assert fetch(hub, tmp_path).read_bytes() == b"changed"


@pytest.mark.parametrize("ranges", [True, False], ids=["by ranges", "whole"])
def test_a_broken_download_is_resumed_if_the_server_can(hub, tmp_path, ranges):
    hub.cuts, hub.ranges = 1, ranges
    with pytest.raises(UnreachableError, match=f"^{address_of(hub)}: (can|down)[^\n]*$"):
        fetch(hub, tmp_path)
    (partial,) = (tmp_path / "raw").rglob("*.partial")
    there = partial.stat().st_size
    assert 0 < there <= len(CONTENT) // 2
    assert fetch(hub, tmp_path).read_bytes() == CONTENT
    assert asked(hub) == [None, f"bytes={there}-"]
    assert not list((tmp_path / "raw").rglob("*.partial"))


@pytest.mark.parametrize(
    ("name", "state", "error", "complaint"),
    [
        ("gone.jsonl", {}, DataError, r"not found \(HTTP 404\)"),
        ("corpus.jsonl", {"gated": True}, DataError, r"Unauthorized \(HTTP 401\)"),
        ("corpus.jsonl", {"busy": 9}, UnreachableError, "cannot be reached: 503"),
        ("signed.jsonl.gz", {"busy": 9}, UnreachableError, "cannot be reached: 503"),
        ("corpus.zip", {}, DataError, r"unsupported format; supported: \.txt"),
    ],
)
def test_a_refusal_is_final_and_a_failure_is_not(hub, tmp_path, name, state, error, complaint):
    hub.busy = state.get("busy", 0)
    hub.repositories["team/data"].gated = "gated" in state
    with pytest.raises(error, match=f"^{address_of(hub, name)}: {complaint}[^\n]*$") as caught:
        list_sources(files_config(address_of(hub, name)), tmp_path)
    assert "hf_signed" not in str(caught.value)


def test_what_a_server_compresses_is_refused_unless_the_name_says_so(hub, tmp_path):
    hub.encoding = "gzip"
    hub.repositories["team/data"] = Repository(dict.fromkeys(("a.jsonl", "a.jsonl.gz"), CONTENT))
    with pytest.raises(DataError, match=f"^{address_of(hub, 'a.jsonl')}: .*Content-Encoding: gzip"):
        list_sources(files_config(address_of(hub, "a.jsonl")), tmp_path)
    (file,) = files_of(tmp_path, address_of(hub, "a.jsonl.gz"))
    assert Path(file.address).read_bytes() == CONTENT
    hub.encoding = "identity"
    assert files_of(tmp_path, address_of(hub, "a.jsonl"))
