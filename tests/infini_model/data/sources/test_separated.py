"""However a file is cut, its ranges hold the documents of the whole file, each once."""

import itertools
from pathlib import Path

import pytest
from corpora import cut_file
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_model.data.sources import separated
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import Reading, read_range
from infini_model.runtime.errors import DataError


def rows(part: FileRange, batch_bytes: int = 1 << 20, **reading: object) -> list[str | None]:
    arrays = read_range(part, Reading(**reading), batch_bytes)
    return [text for array in arrays for text in array.to_pylist()]


def rows_of(parts: list[FileRange], batch_bytes: int = 1 << 20, **reading: object) -> list:
    return [text for part in parts for text in rows(part, batch_bytes, **reading)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("separated") / "a.txt"


@pytest.mark.parametrize("search_bytes", [1, 3, 1 << 18])
@settings(max_examples=150)
@given(
    text=st.text("ab\né", max_size=40),
    separator=st.sampled_from(["\n", "\n\n", "aa", "aba", "abab", "ab", "é", "aab", "zz"]),
    cuts=st.lists(st.integers(1, 50), max_size=5, unique=True).map(sorted),
    batch_bytes=st.integers(1, 20),
)
@example(text="\n\n\n", separator="\n\n", cuts=[1, 2], batch_bytes=1)
@example(text="aaaaaab", separator="aa", cuts=[3], batch_bytes=1)
@example(text="x\n", separator="\n", cuts=[1], batch_bytes=1)
@example(text="", separator="\n", cuts=[], batch_bytes=1)
def test_ranges_hold_what_the_whole_splits_into(
    path, search_bytes, text, separator, cuts, batch_bytes
):
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(separated, "SEARCH_BYTES", search_bytes)
        parts = [rows(part, batch_bytes, separator=separator) for part in cut_file(path, *cuts)]
    assert list(itertools.chain(*parts)) == text.split(separator)


def test_each_document_is_cleaned_by_itself(path):
    path.write_bytes(b"one\n\ncaf\xe9\n\ntwo\n\na\0b\n\nthree")
    parts = cut_file(path, 12)
    assert rows_of(parts, separator="\n\n", errors="skip") == ["one", None, "two", None, "three"]
    with pytest.raises(DataError, match=r"a\.txt: is not UTF-8: .* at byte 8; "):
        rows(parts[0], separator="\n\n")
    for errors in ("fail", "replace"):
        with pytest.raises(
            DataError, match=r"a\.txt: is binary, not text: it has a NUL at byte 17$"
        ):
            rows(parts[1], separator="\n\n", errors=errors)
    path.write_bytes(b"one\n\ncaf\xe9\n\ntwo")
    assert rows_of(cut_file(path, 3), separator="\n\n", errors="replace") == ["one", "caf�", "two"]


def test_a_character_cut_by_a_separator_is_not_joined(path):
    path.write_bytes(b"\xc3--\xa9--ok")
    assert rows_of(cut_file(path), separator="--", errors="skip") == [None, None, "ok"]


def test_a_document_that_is_too_long_is_named_before_it_fills_the_memory(path, monkeypatch):
    monkeypatch.setattr(separated, "MAX_OFFSET", 1000)
    path.write_text("short\n" + "x" * 5000)
    assert path.stat().st_size > 1000
    with pytest.raises(DataError, match=r"a\.txt: the document at byte 6 has more than \d+ bytes"):
        rows_of(cut_file(path), batch_bytes=100, separator="\n")
    with pytest.raises(DataError, match=r"a\.txt: has 5006 bytes; a document has at most 1000"):
        rows_of(cut_file(path))
