"""A corpus is identified by its documents, not by where or how they are stored."""

import json
import sysconfig
from pathlib import Path

import pytest
from corpora import files_config, make_texts, write_files, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.config import FilesSource, SplitsConfig
from infini_model.data.sources.content import buckets_of, hash_documents, splits_of
from infini_model.data.sources.corpus import _bucket_count
from infini_model.data.sources.documents import read_documents
from infini_model.data.sources.download import download, list_files
from infini_model.data.sources.formats import Reading
from infini_model.runtime.errors import DataError


def corpus_of(output_dir: Path, *patterns: object, **fields: object):
    return download(files_config(*patterns, **fields), output_dir)


@settings(max_examples=15, deadline=None)
@given(st.permutations(make_texts(12, longest=20)))
def test_the_fingerprint_is_that_of_the_documents_as_a_multiset(tmp_path_factory, texts):
    root = tmp_path_factory.mktemp("corpus")
    expected = corpus_of(root, write_files(root / "a", make_texts(12, longest=20)) / "*.txt")
    (root / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for other in (
        corpus_of(root, write_files(root / "c", texts) / "*.txt"),
        corpus_of(root, root / "b.jsonl"),
        corpus_of(root, write_parquet(root / "b.parquet", [*texts, ""]), partition_megabytes=1),
    ):
        assert other.fingerprint == expected.fingerprint
        assert other.buckets == expected.buckets
    twice = corpus_of(root, root / "b.jsonl", root / "b.parquet")
    assert twice.documents == 2 * expected.documents
    assert twice.fingerprint != expected.fingerprint
    assert corpus_of(root, write_files(root / "c", texts[1:]) / "*.txt") != expected


def test_sizes_and_what_was_skipped_are_counted(tmp_path):
    texts = ["eins", "", "zwölf", "abc"]
    corpus = corpus_of(tmp_path, write_parquet(tmp_path / "a.parquet", texts))
    assert (corpus.documents, corpus.bytes, corpus.skipped) == (3, 13, 1)
    assert [file.path.name for file in corpus.files] == ["a.parquet"]


def test_buckets_are_a_power_of_two_of_bounded_size(tmp_path):
    texts = [f"{number} " + "x" * 50_000 for number in range(90)]
    corpus = corpus_of(
        tmp_path, write_parquet(tmp_path / "a.parquet", texts), partition_megabytes=1
    )
    assert len(corpus.buckets) == 8
    assert sum(bucket.documents for bucket in corpus.buckets) == 90
    assert sum(bucket.bytes for bucket in corpus.buckets) == corpus.bytes
    one = corpus_of(tmp_path, tmp_path / "a.parquet", partition_megabytes=64)
    assert len(one.buckets) == 1
    assert one.fingerprint == corpus.fingerprint == one.buckets[0].digest


def test_a_small_corpus_has_buckets_for_several_cores():
    mebibyte = 1 << 20
    sizes = {16: 1, 17: 2, 100: 8, 500: 32, 600: 64, 8000: 64, 8200: 128}
    for megabytes, count in sizes.items():
        assert _bucket_count(megabytes * mebibyte, 128 * mebibyte) == count


def test_an_unchanged_source_is_not_read_again(tmp_path):
    raw = write_files(tmp_path / "raw", ["a", "b"])
    first = corpus_of(tmp_path, raw / "*.txt")
    answer = next((tmp_path / "datasets" / ".corpora").glob("*.json"))
    stamp = answer.stat().st_mtime_ns
    raw.rename(tmp_path / "moved")
    moved = corpus_of(tmp_path, tmp_path / "moved" / "*.txt")
    assert moved.fingerprint == first.fingerprint
    assert [file.path.parent.name for file in moved.files] == ["moved", "moved"]
    assert answer.stat().st_mtime_ns == stamp
    answer.write_text("{broken")
    assert corpus_of(tmp_path, tmp_path / "moved" / "*.txt") == moved


def test_bucket_and_split_are_even_and_independent():
    texts = make_texts(4000, longest=2)
    hashes = hash_documents(next(_arrays(texts)))
    splits = splits_of(hashes, SplitsConfig(train=0.5, validation=0.25, test=0.25))
    buckets = buckets_of(hashes, 4)
    for bucket in range(4):
        inside = splits[buckets == bucket]
        assert 0.2 * len(texts) < len(inside) < 0.3 * len(texts)
        assert 0.4 < (inside == 0).mean() < 0.6
    assert set(splits_of(hashes, SplitsConfig(train=1.0, validation=0.0, test=0.0))) == {0}


def _arrays(texts):
    import pyarrow as pa

    yield pa.array(texts)


def test_matches_are_sorted_and_each_file_appears_once(tmp_path):
    raw = write_files(tmp_path / "raw", ["a", "b", "c"])
    source = FilesSource(paths=[str(raw / "000[12].txt"), str(raw / "*.txt"), str(raw / "**/*")])
    found = list_files(source, tmp_path)
    assert [path.name for path in found] == ["0000.txt", "0001.txt", "0002.txt"]


def test_the_standard_library_excludes_installed_packages(tmp_path):
    found = list_files(FilesSource(paths=["{stdlib}/*.py", "{stdlib}/json/**/*.py"]), tmp_path)
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "argparse.py" in found
    assert root / "json" / "decoder.py" in found
    everything = list_files(FilesSource(paths=["{stdlib}/**/*.py"]), tmp_path)
    assert len(everything) > 500
    assert not [path for path in everything if "site-packages" in path.parts]


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
        corpus_of(tmp_path / "out", tmp_path / pattern)
    assert "\n" not in str(caught.value)


def test_no_documents_left_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["abc", "é"])
    config = files_config(tmp_path)
    source = FilesSource(paths=[str(tmp_path / "a.parquet")], min_characters=4)
    with pytest.raises(DataError, match=r"no documents left: 2 of 2 .*min_characters 4"):
        download(config.model_copy(update={"source": source}), tmp_path)


def test_progress_is_in_bytes(tmp_path):
    raw = write_files(tmp_path / "raw", ["a" * 10, "b" * 20])
    many = write_parquet(tmp_path / "a.parquet", ["c" * 9_000_000, "d" * 9_000_000] * 2)
    size = 30 + many.stat().st_size
    reports: list[tuple[int, int]] = []
    download(files_config(raw / "*", many), tmp_path, progress=lambda *seen: reports.append(seen))
    assert {total for _, total in reports} == {size}
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) > 1
    assert reports[-1][0] == size


def test_hashes_do_not_depend_on_the_batch():
    texts = make_texts(20, longest=5)
    array = next(_arrays(texts))
    assert (hash_documents(array)[5:9] == hash_documents(array.slice(5, 4))).all()
    assert len(hash_documents(array.slice(0, 0))) == 0
    assert not list(read_documents([], Reading()))
