"""The files of a source are listed by what identifies their content."""

import hashlib
import os
import sysconfig
import time
from pathlib import Path

import pytest
from corpora import build, files_config, make_texts, write_files, write_parquet

from infini_model.config import FilesSource, SplitsConfig
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.content import hash_documents, splits_of
from infini_model.data.sources.download import download, list_files
from infini_model.data.sources.fingerprints import SETTLED_NANOSECONDS
from infini_model.runtime.errors import DataError


def listing_of(output_dir: Path, *patterns: object):
    return download(files_config(*patterns), output_dir).ranges


def test_a_file_is_identified_by_its_content(tmp_path):
    raw = write_files(tmp_path / "raw", ["eins", "zwölf", "eins"])
    first, second, third = (part.file for part in listing_of(tmp_path, raw / "*.txt"))
    assert first.fingerprint == third.fingerprint != second.fingerprint
    assert first.fingerprint == f"sha256:{hashlib.sha256(b'eins').hexdigest()}"
    assert [file.bytes for file in (first, second, third)] == [4, 6, 4]
    assert first.version != third.version


def read_bytes_of(path: Path) -> int:
    """How many bytes this process has asked of any file."""
    fields = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(fields["rchar"])


def test_a_file_is_read_again_only_if_it_was_written(tmp_path):
    raw = write_files(tmp_path / "raw", ["a" * 1_000_000, "b" * 1_000_000])
    # Files as old as those that a nightly run finds.
    time.sleep(SETTLED_NANOSECONDS / 1e9)
    first = listing_of(tmp_path, raw / "*.txt")
    before = read_bytes_of(Path("/proc/self/io"))
    assert listing_of(tmp_path, raw / "*.txt") == first
    assert read_bytes_of(Path("/proc/self/io")) - before < 500_000
    stat = (raw / "0001.txt").stat()
    (raw / "0001.txt").write_text("c" * 1_000_000)
    # A program may restore the time of modification, but not that of the change.
    os.utime(raw / "0001.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = listing_of(tmp_path, raw / "*.txt")
    assert second[0] == first[0]
    assert second[1].file.fingerprint != first[1].file.fingerprint


def test_a_damaged_memory_costs_only_time(tmp_path):
    raw = write_files(tmp_path / "raw", ["a", "b"])
    first = listing_of(tmp_path, raw / "*.txt")
    for path in (tmp_path / "datasets" / ".remembered").glob("*.json"):
        path.write_text("{broken")
    assert listing_of(tmp_path, raw / "*.txt") == first


def test_splits_are_even_and_depend_on_the_document_alone():
    texts = make_texts(4000, longest=2)
    hashes = hash_documents(next(_arrays(texts)))
    splits = splits_of(hashes, SplitsConfig(train=0.5, validation=0.25, test=0.25))
    assert 0.45 < (splits == 0).mean() < 0.55
    assert 0.22 < (splits == 1).mean() < 0.28
    assert set(splits_of(hashes, SplitsConfig(train=1.0, validation=0.0, test=0.0))) == {0}


def _arrays(texts):
    import pyarrow as pa

    yield pa.array(texts)


def test_matches_are_sorted_and_each_file_appears_once(tmp_path):
    raw = write_files(tmp_path / "raw", ["a", "b", "c"])
    source = FilesSource(paths=[str(raw / "000[12].txt"), str(raw / "*.txt"), str(raw / "**/*")])
    found = list_files(source, tmp_path)
    assert [Path(name).name for name in found] == ["0000.txt", "0001.txt", "0002.txt"]


def test_a_relative_pattern_finds_the_same_files_in_any_folder(tmp_path, monkeypatch):
    here = tmp_path / "[ab]*"
    raw = write_files(here / "raw", ["a", "b"])
    monkeypatch.chdir(here)
    source = FilesSource(paths=["raw/*.txt", "./raw//*.txt", "raw/*"])
    assert list_files(source, tmp_path) == [str(raw / "0000.txt"), str(raw / "0001.txt")]


def test_the_standard_library_excludes_installed_packages(tmp_path):
    found = list_files(FilesSource(paths=["{stdlib}/*.py", "{stdlib}/json/**/*.py"]), tmp_path)
    root = Path(sysconfig.get_path("stdlib"))
    assert str(root / "argparse.py") in found
    assert str(root / "json" / "decoder.py") in found
    everything = list_files(FilesSource(paths=["{stdlib}/**/*.py"]), tmp_path)
    assert len(everything) > 500
    assert not [name for name in everything if "site-packages" in Path(name).parts]


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("*.txt", r"'.*\*\.txt' matches no file$"),
        ("", r"matches no file; it is a folder: write .*/\*\*/\*\.txt"),
        ("image.png", r"image\.png: unknown file format; takes \.txt"),
        ("empty/*", r"0000\.txt and 1 more: no documents left: 2 of 2 are empty"),
        ("latin.md", r"latin\.md: is not UTF-8"),
    ],
)
def test_errors_of_sources_are_one_line(tmp_path, pattern, complaint):
    (tmp_path / "image.png").write_bytes(b"png")
    (tmp_path / "latin.md").write_bytes(b"\xe9")
    write_files(tmp_path / "empty", ["", ""])
    with pytest.raises(DataError, match=complaint) as caught:
        build(files_config(tmp_path / pattern), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_pattern_of_an_unknown_user_matches_nothing(tmp_path):
    with pytest.raises(DataError, match=r"'~nobody-here/\*\.txt' matches no file$"):
        list_files(FilesSource(paths=["~nobody-here/*.txt"]), tmp_path)


def test_no_documents_left_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["abc", "é"])
    config = files_config(tmp_path)
    source = FilesSource(paths=[str(tmp_path / "a.parquet")], min_characters=4)
    with pytest.raises(DataError, match=r"no documents left: 2 of 2 .*min_characters 4"):
        build(config.model_copy(update={"source": source}), tmp_path)


def test_progress_is_in_bytes_of_text(tmp_path):
    raw = write_files(tmp_path / "raw", ["a" * 10, "b" * 20])
    many = write_parquet(tmp_path / "a.parquet", [letter * 9_000_000 for letter in "cdef"])
    reports: list[tuple[int, int]] = []
    config = files_config(raw / "*", many)
    listing = download(config, tmp_path)
    build_dataset(listing, config, tmp_path, progress=lambda *seen: reports.append(seen))
    (total,) = {total for _, total in reports}
    assert total > 30
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == total


def test_hashes_do_not_depend_on_the_batch():
    texts = make_texts(20, longest=5)
    array = next(_arrays(texts))
    assert (hash_documents(array)[5:9] == hash_documents(array.slice(5, 4))).all()
    assert len(hash_documents(array.slice(0, 0))) == 0
