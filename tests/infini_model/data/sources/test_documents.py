"""Every format gives the same documents, and errors name the file and the row."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import cut_file, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.data.sources.documents import read_documents
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import BATCH_BYTES, Reading
from infini_model.runtime.errors import DataError


def whole(*paths: Path) -> list[FileRange]:
    return [part for path in paths for part in cut_file(path)]


def read(*paths: Path, batch_bytes: int = BATCH_BYTES, **reading: object) -> list[str]:
    return [
        text
        for batch in read_documents(whole(*paths), Reading(**reading), batch_bytes)
        for text in batch.texts.to_pylist()
    ]


def skipped(*paths: Path, **reading: object) -> int:
    return sum(batch.skipped for batch in read_documents(whole(*paths), Reading(**reading)))


def write_all_formats(folder: Path, texts: list[str]) -> list[Path]:
    lines = b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": table["text"].dictionary_encode()}), folder / "b.parquet")
    binary = pa.table({"text": pa.array([text.encode() for text in texts], pa.large_binary())})
    pq.write_table(binary, folder / "c.parquet")
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    with pa.ipc.new_file(folder / "b.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return sorted(folder.iterdir())


@settings(max_examples=25)
@given(st.lists(st.text(), max_size=6))
def test_all_formats_hold_the_same_documents(tmp_path_factory, texts):
    kept = [text for text in texts if text]
    for path in write_all_formats(tmp_path_factory.mktemp("formats"), texts):
        assert read(path) == kept, path.name
        assert skipped(path) == len(texts) - len(kept), path.name


@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".py"])
def test_a_text_file_is_one_document(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes("ein\r\nGroßes\n".encode())
    assert read(path) == ["ein\r\nGroßes\n"]


@given(st.lists(st.text("ab \n", min_size=1), min_size=1, max_size=6))
def test_a_separator_splits_a_text_file_into_documents(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_text("--".join(texts), newline="")
    assert read(path, separator="--") == texts


def test_batches_are_bounded_and_keep_the_order(tmp_path):
    texts = [f"{number} " + "x" * (number * 7 % 600) for number in range(200)]
    paths = write_all_formats(tmp_path, texts)
    for path in paths:
        batches = list(read_documents(whole(path), Reading(), batch_bytes=1000))
        assert len(batches) > 3
        assert [text for batch in batches for text in batch.texts.to_pylist()] == texts


def test_ranges_share_batches_and_hold_every_document_once(tmp_path):
    texts = [f"{number} " + "x" * (number * 7 % 600) for number in range(100)]
    small = [tmp_path / f"{number:03d}.txt" for number in range(100)]
    for path, text in zip(small, texts, strict=True):
        path.write_text(text)
    parquet = tmp_path / "050.parquet"
    pq.write_table(pa.table({"text": texts}), parquet, row_group_size=2, use_dictionary=False)
    paths = sorted([*small, parquet])
    ranges = [part for path in paths for part in cut_file(path, *[7, 30] * (path == parquet))]
    batches = list(read_documents(ranges, Reading(), batch_bytes=3000))
    assert [text for batch in batches for text in batch.texts.to_pylist()] == (
        texts[:50] + texts + texts[50:]
    )
    assert max(batch.texts.nbytes for batch in batches) < 6000
    assert len(batches) < 40


def test_a_bad_row_is_named_in_any_part(tmp_path):
    rows = [b"fine " * 10] * 40
    rows[33] = b"\xe9"
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(rows, pa.binary())}), path, row_group_size=3)
    with pytest.raises(DataError, match=r"a\.parquet, row 34: is not UTF-8"):
        read(path, batch_bytes=50)


def test_short_and_empty_documents_are_skipped_and_counted(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["", "é", "éé", None, "abc"])
    assert read(path, min_characters=2) == ["éé", "abc"]
    assert skipped(path, min_characters=2) == 3


def test_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9!")
    with pytest.raises(DataError, match=r"a\.txt: is not UTF-8: .* at byte 3"):
        read(path)
    assert read(path, errors="replace") == ["caf�!"]
    assert read(path, errors="skip") == []
    assert skipped(path, errors="skip") == 1


def test_not_utf8_in_rows_is_named_by_row(tmp_path):
    table = pa.table({"text": pa.array([b"good", b"caf\xe9"], pa.binary())})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    # A column that is declared as text but is not.
    claimed = pa.Array.from_buffers(pa.string(), 2, table["text"].chunk(0).buffers())
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.schema([("text", pa.string())])) as out:
        out.write_batch(pa.record_batch([claimed], ["text"]))
    for name, where in (("a.parquet", "row 2"), ("a.jsonl", "line 2"), ("a.arrow", "row 2")):
        with pytest.raises(DataError, match=rf"{name}, {where}: is not UTF-8"):
            read(tmp_path / name)
        assert read(tmp_path / name, errors="replace") == ["good", "caf�"]
        assert read(tmp_path / name, errors="skip") == ["good"]


def test_a_lone_surrogate_in_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x\\ud83e\\udd8a"}\n\n{"text": "a\\ud800b"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: is not UTF-8: a lone surrogate"):
        read(path)
    assert read(path, errors="replace") == ["x🦊", "a�b"]
    assert read(path, errors="skip") == ["x🦊"]


def test_a_binary_file_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"PK\0\0")
    for errors in ("fail", "replace"):
        with pytest.raises(DataError, match=r"a\.txt: is binary, not text: .* byte 2"):
            read(path, errors=errors)
    assert read(path, errors="skip") == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_missing_column_is_named_with_the_existing_ones(tmp_path, name):
    write_all_formats(tmp_path, ["x"])
    with pytest.raises(DataError, match=rf"{name}.*no column 'article'; it has: .*text"):
        read(tmp_path / name, column="article")


def test_a_column_that_is_not_text_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(DataError, match=r"a\.parquet: column 'number' is int64, not text"):
        read(path, column="number")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    with pytest.raises(DataError, match=r"line 2: column 'text' is int, not text"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{broken", "is not JSON"), ("[1]", "needs an object"), ("[" * 100_000, "is not JSON")],
)
def test_a_line_that_is_not_an_object_is_named(tmp_path, line, complaint):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{complaint}") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_truncated_files_are_named(tmp_path):
    texts = [f"{number} " * 50 for number in range(500)]
    for path in write_all_formats(tmp_path, texts):
        if path.name in ("a.jsonl", "b.arrow"):
            continue
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(DataError, match=path.name) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_a_file_of_the_wrong_format_or_missing_is_named(tmp_path):
    (tmp_path / "a.parquet").write_text("text")
    (tmp_path / "a.arrow").write_text("text")
    (tmp_path / "gone.txt").write_text("text")
    for name in ("a.parquet", "a.arrow", "gone.txt"):
        ranges = whole(tmp_path / name)
        if name == "gone.txt":
            (tmp_path / name).unlink()
        with pytest.raises(DataError, match=name):
            list(read_documents(ranges, Reading()))


def test_a_document_larger_than_a_batch_stays_whole(tmp_path):
    large = "0123456789" * 2_000_000
    path = write_parquet(tmp_path / "a.parquet", ["a", large, "b"])
    assert read(path) == ["a", large, "b"]
