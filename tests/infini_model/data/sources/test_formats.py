"""Every format gives the same documents, wherever it lies; errors name the file and the row.

Arrow's parser of JSON gives exactly what Python's does.
"""

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import cut_file, local_file, rows_of, write_parquet
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from infini_model.config import FilesSource
from infini_model.data.sources import formats, rows, text
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import (
    BATCH_BYTES,
    read_documents,
    read_range,
    whole_file,
)
from infini_model.data.sources.json_values import values_in
from infini_model.data.sources.listing import list_objects
from infini_model.data.sources.rows import Reading
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.object_store import ObjectStore

SEPARATOR = "\n\n"
SEARCH_BYTES = "infini_model.data.sources.text.SEARCH_BYTES"


def read(*ranges: FileRange, batch_bytes: int = BATCH_BYTES, **reading) -> tuple[list[str], int]:
    """The documents of ranges of files, and how many rows were left out."""
    batches = list(read_documents(ranges, Reading(**reading), batch_bytes))
    texts = [text for batch in batches for text in batch.texts.to_pylist()]
    return texts, sum(batch.skipped for batch in batches)


def json_lines(texts: list[str | None]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write_every_format(folder: Path, texts: list[str | None]) -> list[Path]:
    """One document a row, in all formats and types of columns that hold text."""
    lines = json_lines(texts)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "b.json.gz").write_bytes(gzip.compress(lines))  # as C4 is
    rows = [json.loads(line) for line in lines.splitlines()]
    (folder / "a.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (folder / "c.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    for name, dialect in (("a.csv.zstd", "excel"), ("a.tsv", "excel-tab")):
        table = io.StringIO(newline="")
        csv.writer(table, dialect).writerows([["id", "text"], *([1, text] for text in texts)])
        data = table.getvalue().encode()
        (folder / name).write_bytes(zstandard.compress(data) if "z" in name else data)
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, folder / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": table["text"].dictionary_encode()}), folder / "b.parquet")
    pq.write_table(pa.table({"text": table["text"].cast(pa.large_binary())}), folder / "c.parquet")
    return sorted(folder.iterdir())


@settings(max_examples=25)
@given(st.lists(st.none() | st.text(), max_size=6))
def test_all_formats_hold_the_same_documents(tmp_path_factory, texts):
    kept = [text for text in texts if text]
    for path in write_every_format(tmp_path_factory.mktemp("formats"), texts):
        assert read(*cut_file(path)) == (kept, len(texts) - len(kept)), path.name


@pytest.mark.parametrize("place", ["here", "in a store"])
def test_batches_are_bounded_and_keep_the_order_wherever_a_file_lies(tmp_path, request, place):
    texts = [f"{number} " + "x" * (number * 7 % 600) for number in range(60)]
    texts[50] = "larger than a batch" * 100
    (tmp_path / "a.txt").write_text(SEPARATOR.join(texts))
    paths = write_every_format(tmp_path, texts)
    files = list(map(local_file, paths))
    if place == "in a store":
        bucket = request.getfixturevalue("bucket")
        for path in paths:
            ObjectStore(bucket).upload(path.name, path)
            path.unlink()
        files = list_objects(f"{bucket}/**")
    for file in files:
        reading = Reading(separator=SEPARATOR)
        batches = list(read_documents([whole_file(file)], reading, batch_bytes=1000))
        assert len(batches) > 3
        assert [text for batch in batches for text in batch.texts.to_pylist()] == texts


@settings(max_examples=50)
@given(
    texts=st.lists(st.none() | st.text(max_size=5), max_size=12),
    group=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 12), max_size=3, unique=True).map(sorted),
)
def test_row_groups_hold_each_row_once(tmp_path_factory, texts, group, cuts):
    path = tmp_path_factory.mktemp("groups") / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)
    groups = pq.read_metadata(path).num_row_groups
    parts = cut_file(path, *(cut for cut in cuts if cut < groups))
    assert rows_of(*parts, batch_bytes=5) == texts


def test_short_rows_are_left_out(tmp_path):
    for path in write_every_format(tmp_path, ["é", "éé", "", None, "abc"]):
        assert read(*cut_file(path), min_characters=2) == (["éé", "abc"], 3)


FINE = [b"fine"] * 33
READ = ["fine"] * 33
BROKEN = gzip.compress(b'{"text": "a"}\n{broken', mtime=0)
SURROGATES = b'{"text": "x\\ud83e\\udd8a"}\n\n{"text": "a\\ud800b"}\n'


# A file, what is said of it, and its documents if bad ones are replaced, or skipped, if they can.
@pytest.mark.parametrize(
    ("name", "content", "complaint", "replaced", "kept"),
    [
        ("a.txt", b"caf\xe9!", "is not UTF-8: .* at byte 3", ["caf�!"], []),
        ("a.txt", b"PK\0\0", "is binary or UTF-16, not UTF-8: .* at byte 2$", None, []),
        ("a.jsonl", b'{}\n{"text": 5}', "line 1: has no column 'text'", None, None),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "line 2: column 'text' is int", None, None),
        ("a.jsonl.gz", BROKEN, "line 2: is not JSON: ", None, None),
        ("a.jsonl", b'{"text": "a"}\n[1]', "line 2: holds list, needs an object$", None, None),
        ("a.json", b'[{"text": "a"}, 1]', "row 2: holds int, needs an object$", None, None),
        ("a.json", b'[{"text": "a"},{b', "row 2: is not JSON: ", None, None),
        ("a.json", b'[{"text": "a"}', "row 2: the file ends inside its array", None, None),
        ("a.json", b'[{"text":"a"},{"text":"\xe9"}]', "row 2: is not UTF-8", ["a", "�"], ["a"]),
        ("a.csv", b"id,text\n1,a\n2,\xe9\n", "row 2: is not UTF-8", ["a", "�"], ["a"]),
        ("a.csv", b"id,text,text\n1,a", "row 1: has 2 columns 'text'", None, None),
        ("a.csv", b"id,body\n1,a", "row 1: has no column 'text'; it has: id, body", None, None),
        ("a.csv", b"id,text\n1,a\n2,b,c", "row 2: has 3 fields, 2 columns", None, None),
        ("a.csv", b'text\na\n"b\nc', "row 2: at line 4: unexpected end", None, None),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "line 2: is not UTF-8", ["a", "�"], ["a"]),
        ("a.jsonl", SURROGATES, "line 3: is not UTF-8: a lone", ["x🦊", "a�b"], ["x🦊"]),
        ("a.parquet", [*FINE, b"\xe9"], "row 34: is not UTF-8", [*READ, "�"], READ),
    ],
)
def test_what_is_no_text_is_named_or_replaced(tmp_path, name, content, complaint, replaced, kept):
    path = tmp_path / name
    if name == "a.parquet":
        # A column that is declared as text but is not.
        claimed = pa.array(content, pa.binary()).view(pa.string())
        pq.write_table(pa.table({"text": claimed}), path, row_group_size=3)
    else:
        path.write_bytes(content)
    for errors in ("fail",) if replaced else ("fail", "replace"):
        with pytest.raises(DataError, match=rf"{name}\W+{complaint}"):
            read(*cut_file(path), batch_bytes=100, errors=errors)
    if replaced:
        assert read(*cut_file(path), errors="replace") == (replaced, 0)
    if kept is not None:
        assert read(*cut_file(path), errors="skip") == (kept, 1)


def test_a_column_that_is_missing_or_not_text_is_named(tmp_path):
    for path in write_every_format(tmp_path, ["x"]):
        with pytest.raises(DataError, match=rf"{path}.*: has no column 'article'; it has: .*text"):
            read(*cut_file(path), column="article")
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(DataError, match=r"a\.parquet: column 'number' is int64, not text"):
        read(*cut_file(path), column="number")
    (tmp_path / "a.jsonl").write_text('{"text": ["x"]}')
    with pytest.raises(DataError, match=r"line 1: column 'text' is list, not text"):
        read(*cut_file(tmp_path / "a.jsonl"))
    pq.write_table(pa.table({"text": [["x"]]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: column 'text' is list<.*, not text"):
        read(*cut_file(path))
    pq.write_table(pa.table([["x"], ["y"]], ["text", "text"]), path)
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns 'text'"):
        read(*cut_file(path))


def test_a_file_that_is_torn_or_of_another_format_is_named_in_one_line(tmp_path):
    paths = write_every_format(tmp_path, [f"{number} " * 50 for number in range(500)])
    for path in paths:
        data = path.read_bytes()
        harms = [data[: len(data) * 2 // 3], b"text"]
        if path.name == "a.tsv":
            harms = [b'text\n"x']  # a quote that nothing closes
        # Of lines, a part is as good as the whole.
        for harm in harms[1:] if path.name == "a.jsonl" else harms:
            path.write_bytes(harm)
            with pytest.raises(DataError, match=path.name) as caught:
                read(*cut_file(path))
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["here", "in a store"])
def test_a_file_that_has_changed_or_gone_since_it_was_listed_is_named(tmp_path, request, place):
    for name in ("a.txt", "a.parquet", "empty.txt"):
        path, gone = write_parquet(tmp_path / name, ["old"]), "does not exist"
        write, remove = path.write_bytes, path.unlink
        if name == "empty.txt":
            write(b"")
        (part,) = cut_file(path)
        if place == "in a store":
            store, gone = ObjectStore(request.getfixturevalue("bucket")), "not found"
            write, remove = partial(store.write, name), partial(store.delete, [name])
            store.upload(name, path)
            part = whole_file(list_objects(store.address_of(name))[0])
        for change, complaint in (
            (partial(write, b"new"), "changed while it was read; run again"),
            (remove, gone),
        ):
            change()
            with pytest.raises(UserError, match=f"^{part.file.address}: {complaint}$"):
                read(part)


@pytest.mark.parametrize("search_bytes", [1, 3, 1 << 18])
@settings(max_examples=150)
@given(
    text=st.lists(st.sampled_from([*"ab\n\ré", "\r\n"]), max_size=40).map("".join),
    separator=st.sampled_from(
        ["\n", "\n\n", "\na\n", "aa", "aba", "abab", "ab", "é", "aab", "zz", "\r\n\n", "\r"]
    ),
    cuts=st.lists(st.integers(1, 50), max_size=5, unique=True).map(sorted),
    batch_bytes=st.integers(1, 20),
)
@example(text="\n\n\n", separator="\n\n", cuts=[1, 2], batch_bytes=1)
@example(text="aaaaaab", separator="aa", cuts=[3], batch_bytes=1)
@example(text="x\n", separator="\n", cuts=[1], batch_bytes=1)
@example(text="", separator="\n", cuts=[], batch_bytes=1)
@example(text="a\r\n\r\n\r\nb\r\n\n\r\r\n\nc\r", separator="\n\n", cuts=[2, 4, 9], batch_bytes=1)
def test_ranges_hold_the_whole(tmp_path_factory, search_bytes, text, separator, cuts, batch_bytes):
    path = tmp_path_factory.getbasetemp() / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SEARCH_BYTES, search_bytes)
        parts = cut_file(path, *cuts)
        found = rows_of(*parts, batch_bytes=batch_bytes, separator=separator)
    plain = separator.replace("\r\n", "\n")
    assert found == re.split(plain.replace("\n", "\r?\n"), text)


def test_each_document_is_cleaned_by_itself(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ncaf\xe9\n\ntwo\n\na\0b\n\nthree")
    parts = cut_file(path, 12)
    assert rows_of(*parts, separator="\n\n", errors="skip") == ["one", None, "two", None, "three"]
    with pytest.raises(DataError, match=r"a\.txt: is not UTF-8: .* at byte 8; "):
        rows_of(parts[0], separator="\n\n")
    with pytest.raises(DataError, match=r"a\.txt: is binary or .*: it has a NUL at byte 17$"):
        rows_of(parts[1], separator="\n\n")
    assert rows_of(parts[0], separator="\n\n", errors="replace") == ["one", "caf�", "two"]


def test_files_of_windows_hold_the_same_documents(tmp_path):
    texts = ["naïve 日本", "two\nlines", "the end"]
    plain = SEPARATOR.join(texts).encode()
    marked = SEPARATOR.join(f"\ufeff{text}" for text in texts)
    windows = marked.replace("\n", "\r\n").encode()
    path = tmp_path / "a.txt"
    for content in (plain, windows, marked.encode()):
        path.write_bytes(content)
        parts = cut_file(path, 9, 30)
        found = rows_of(*parts, separator=SEPARATOR, batch_bytes=9)
        assert [text.replace("\r\n", "\n") for text in found] == texts
        # A mark is dropped at the start of a line, wherever files were joined.
        (whole,) = rows_of(*cut_file(path))
        assert whole.replace("\r\n", "\n") == SEPARATOR.join(texts)
    lines = "".join(f'\ufeff{{"text": "{text}"}}\r\n' for text in ("a", "日本")) + "\ufeff\n"
    path = tmp_path / "a.jsonl"
    path.write_text(lines)
    assert rows_of(*cut_file(path, 9, 30)) == ["a", "日本"]
    path.write_text(lines + "broken")
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: is not JSON"):
        rows_of(*cut_file(path))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv"])
@pytest.mark.parametrize("text", ['{"text": "text"}\n', "日本"])
def test_a_file_in_utf_16_is_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(DataError, match=rf"{name}: is .*not UTF-8: "):
        rows_of(*cut_file(path), separator=SEPARATOR)


def test_a_document_that_is_too_long_is_named_before_it_fills_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    for module in (formats, text):
        monkeypatch.setattr(module, "MAX_OFFSET", 1000)
    path.write_text("short\n" + "x" * 5000)
    assert path.stat().st_size > 1000
    with pytest.raises(DataError, match=r"a\.txt: the document at byte 6 has more than \d+ bytes"):
        rows_of(*cut_file(path), batch_bytes=100, separator="\n")
    with pytest.raises(DataError, match=r"a\.txt: has 5006 bytes; a document has at most 1000"):
        rows_of(*cut_file(path))


def test_a_cut_with_no_separator_behind_it_takes_little_memory(tmp_path):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    part = whole_file(local_file(path)).model_copy(update={"start": 1 << 20})
    tracemalloc.start()
    try:
        assert list(read_range(part, Reading(separator="\n"))) == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_of_a_table_in_a_store_little_more_is_read_than_the_texts(tmp_path, bucket, monkeypatch):
    rows, path, read = 8, tmp_path / "a.parquet", []
    texts = ["some words " * 50_000] * rows
    table = pa.table({"text": texts, "other": [os.urandom(3 << 20) for _ in range(rows)]})
    pq.write_table(table, path, row_group_size=1, compression="none", use_dictionary=False)
    ObjectStore(bucket).upload(path.name, path)
    (file,) = list_objects(f"{bucket}/**")
    plain = ObjectStore.read_range

    def counted(store, key, start, stop, version):
        read.append(stop - start)
        return plain(store, key, start, stop, version)

    monkeypatch.setattr(ObjectStore, "read_range", counted)
    (batch,) = read_documents([whole_file(file)], Reading(), batch_bytes=64 << 20)
    assert batch.texts.to_pylist() == texts
    assert sum(read) < 2 * sum(map(len, texts)) < file.bytes / 2


PEAK = """
import sys
from pathlib import Path
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import read_range
from infini_model.data.sources.rows import Reading

def peak():
    # Not that of getrusage, which a process inherits from the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

part = FileRange.model_validate_json(sys.argv[1])
reading = Reading(separator="\\n\\n")
next(read_range(part, reading))  # loads the code that is needed
before = peak()
size = sum(array.nbytes for array in read_range(part, reading))
print(size, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt", "a.json", "a.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    texts = [f"{number} " + "some words of text " * 500 for number in range(12_500)]
    path = tmp_path / name
    # A reader that takes the whole of anything takes all of it.
    if name == "a.parquet":
        # Neither compressed nor as a dictionary: the group is as large in the file as in memory.
        write_parquet(path, texts, row_group_size=1 << 30, compression="none", use_dictionary=False)
    elif name == "a.txt":
        path.write_text(SEPARATOR.join(texts))
    elif name == "a.csv":
        path.write_text("\n".join(["text", *texts]))
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        path.write_bytes(gzip.compress(json_lines(texts), 1))
    part = whole_file(local_file(path)).model_dump_json()
    command = [sys.executable, "-c", PEAK, part]
    # Arrow's own allocator keeps freed memory for a while.
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    size, peak = map(int, out.stdout.split())
    assert size > 100 << 20
    assert peak < 64 << 20


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv"])
def test_a_format_is_that_of_the_suffix_unless_it_is_given(tmp_path, suffix):
    for name in ("file", f"file{suffix}", f"file{suffix.upper()}", "file.dat"):
        path = tmp_path / f"{suffix[1:]}-{name}"
        path.write_text({".csv": "text\nx", ".txt": "x"}.get(suffix, '{"text": "x"}'))
        kind = "text" if suffix == ".txt" else suffix[1:]
        (part,) = cut_file(path, given=kind if name in ("file", "file.dat") else None)
        assert rows_of(part) == ["x"]
        assert part.format == kind


def test_the_setting_takes_each_format():
    kinds = get_args(get_args(FilesSource.model_fields["format"].annotation)[0])
    assert kinds == tuple(formats.FORMATS)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("text", max_size=4), inner),
    max_leaves=5,
)


def test_a_column_is_one_whose_own_name_may_have_a_dot(tmp_path):
    texts = ["a", None, "b"]
    table = pa.table({"doc.text.more": ["x"] * 3, "doc": [{"title": "x"}] * 3, "doc.text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(table.to_pylist()))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))
    for path in sorted(tmp_path.glob("a.*")):
        assert rows_of(*cut_file(path), column="doc.text") == texts
        with pytest.raises(
            DataError, match=r"has no column 'doc\.title'; it has: doc\.text\.more, "
        ):
            rows_of(*cut_file(path), column="doc.title")


@settings(max_examples=100)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=5),
    st.none() | st.integers(0, 2),
    st.booleans(),
    st.integers(1, 40),
)
def test_values_are_those_of_json_wherever_chunks_end(values, indent, in_array, size):
    def dump(value: object) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=False)

    content = dump(values) if in_array else "\r\n".join(map(dump, values))
    data = content.encode()
    whole = list(values_in([data] if data else []))
    assert dump(whole) == dump(values)
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    assert dump(list(values_in(pieces))) == dump(values)
    if in_array:
        with pytest.raises(DataError):
            list(values_in([data[:-1]]))


ERRORS = ("fail", "skip", "replace")
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """The texts of lines, or why there are none; `parser` replaces functions of the reader."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"

    def outcome(data: bytes, errors: str = "fail", column: str = "text", **parser) -> object:
        path.write_bytes(data + b"\n")  # so that all lines are in one block
        with pytest.MonkeyPatch.context() as patch:
            for name, function in parser.items():
                patch.setattr(rows, name, function)
            try:
                return rows_of(*cut_file(path), errors=errors, column=column)
            except DataError as error:
                return str(error).removeprefix(f"{path}, ")

    return outcome


# Valid lines, written as different programs do.
LINES = st.builds(
    lambda row, ascii_, space: json.dumps(
        row, ensure_ascii=ascii_, separators=(",", ":" + space)
    ).encode("utf-8", "surrogatepass"),
    st.fixed_dictionaries(
        {"text": st.text(max_size=8) | VALUES}, optional={"id": VALUES, "a": VALUES}
    ),
    st.booleans(),
    st.sampled_from(["", " "]),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b'"text"', b'"text":', b'{"text":"a"', b"\\"),
    *(b'{"text":"a"}', b'"x":', b"null", b"true", b"1", b"-", b"01", b"1e999", b"9" * 30),
    *(b"NaN", b"-NaN", b"Inf", b"-Inf", b"Infinity", b"-Infinity", b"a", b"/"),
    *(b"\\ud83e", b"\\udd8a", b"\\u0000", b"\xff", b"\xc3", b"\xa9", b"\xed\xa0\x80"),
    *(b"\n", b"\r\n", b"\r", b" ", b"\t", b"\x0b", b"\x0c", b"\0", b"\x1f", b"\x7f"),
    *(b"\xef\xbb\xbf", b"\xe2\x80\xa8"),
)
SOUP = st.lists(st.sampled_from(TOKENS), max_size=12).map(b"".join)


@st.composite
def mutated(draw) -> bytes:
    """A valid line with a few bytes replaced, inserted or left out."""
    line = draw(LINES)
    for _ in range(draw(st.integers(1, 2))):
        at, width = draw(st.integers(0, len(line))), draw(st.integers(0, 2))
        line = line[:at] + draw(st.sampled_from([*TOKENS, b""])) + line[at + width :]
    return line


BLOCKS = st.lists(LINES | LINES | mutated() | SOUP, max_size=5).map(b"\n".join)


@settings(max_examples=250)
@given(BLOCKS, st.sampled_from(ERRORS), st.sampled_from(["text", "x", "a", "a.t"]))
@example(b'{"text":"a"}{"text":"b"}\n{"text":"c","x":{}\n}', "fail", "text")
@example(b'{"text":"a","text":"b"}\n{"text":"a","text":null}', "fail", "text")
@example(b'{"text":"a","x":1e999}\n{"text":"b","x":NaN}', "fail", "text")
@example(b'\xef\xbb\xbf{"text":"a"}', "fail", "text")
@example(b'{"text":null}\n{"x":1}', "skip", "text")
@example(b'\r\n{"text":"a"}\r\n\r\n\n{"text":"b"}\n\x0c\n', "fail", "text")
@example(b'{"te\\u0078t":"a\\u0000b"}', "fail", "text")
@example(b'{"text":"a","x":"\xff"}', "skip", "text")
@example(b'{"text":"a","x":' + b"9" * 5000 + b"}", "fail", "text")
@example(b'{"text":"a"}\0', "fail", "text")
@example(b"[" * 100_000, "fail", "text")
@example(b'{"text":' + DEEP + b"}", "fail", "text")
def test_both_parsers_agree(parsed, data, errors, column):
    # Numbers to Arrow alone, in fields that nobody reads.
    assume(not re.search(rb"Inf(?!inity)|-NaN", data))
    by_python = parsed(data, errors, column, parse_by_arrow=lambda *_: None)
    assert parsed(data, errors, column) == by_python


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(json.dumps, st.fixed_dictionaries({"text": st.text(), "x": VALUES})), min_size=1
    )
)
def test_arrow_reads_what_is_usual(parsed, lines):
    texts = [json.loads(line)["text"] for line in lines]
    data = "\n".join(lines).encode()
    assert parsed(data, object_in=lambda *_: pytest.fail("read by Python")) == texts


def test_what_is_nested_too_deeply_for_python_is_said_in_one_line(parsed):
    line = b'{"text": "a", "x": ' + DEEP + b"}"
    assert parsed(line) == ["a"]  # Arrow has no such limit
    said = parsed(b'{"text": null}\n' + line)
    assert said == "line 2: is not JSON: it is nested too deeply"


def test_a_frame_with_a_window_that_is_too_long_says_how_to_compress_it_again(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    # As `zstd --long=31` writes what it reads from a pipe.
    parameters = zstandard.ZstdCompressionParameters(window_log=31, strategy=1, hash_log=10)
    writing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(writing.compress(json_lines(["a"])) + writing.flush())
    with pytest.raises(DataError, match=r"a\.jsonl\.zst: .*memory.*; compress it again: zstd -d"):
        read(*cut_file(path))


@pytest.mark.parametrize(("kind", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_files_of_several_members_are_read_to_the_end(tmp_path, kind, compress):
    texts, path = [f"{number} " * 50 for number in range(3000)], tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(json_lines(texts[:1700])) + compress(json_lines(texts[1700:])))
    assert rows_of(*cut_file(path), batch_bytes=10_000) == texts
