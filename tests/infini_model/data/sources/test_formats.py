"""Ranges of Parquet and Arrow files, and reading with memory that does not grow with the file."""

import contextlib
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import cut_file, local_file
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.data.sources import formats
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import BATCH_DOCUMENTS, Reading, check_format, read_range
from infini_model.runtime.errors import DataError

MEGABYTE = 1 << 20


def rows(*parts: FileRange, batch_bytes: int = MEGABYTE) -> list[str | None]:
    return [
        text
        for part in parts
        for array in read_range(part, Reading(), batch_bytes)
        for text in array.to_pylist()
    ]


@settings(max_examples=50)
@given(
    texts=st.lists(st.none() | st.text(max_size=5), max_size=12),
    group=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 12), max_size=3, unique=True).map(sorted),
    limit=st.none() | st.integers(1, 15),
)
def test_row_groups_hold_each_row_once(tmp_path_factory, texts, group, cuts, limit):
    path = tmp_path_factory.mktemp("groups") / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group)
    groups = pq.read_metadata(path).num_row_groups
    parts = cut_file(path, *(cut for cut in cuts if cut < groups))
    assert rows(*parts, batch_bytes=5) == texts
    limited = FileRange(file=local_file(path), rows=limit)
    assert rows(limited, batch_bytes=5) == texts[:limit]


def test_a_file_without_row_groups_has_no_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pq.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    assert pq.read_metadata(path).num_row_groups == 0
    assert rows(*cut_file(path)) == []


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl.gz", "a.jsonl", "a.txt", "a.arrow", "b.arrow"]
)
def test_a_file_need_not_be_on_this_machine(tmp_path, monkeypatch, name):
    """All that a remote file can do is read and seek."""
    texts = [f"{number} " * 20 for number in range(50)]
    path = tmp_path / name
    if name == "b.arrow":
        with pa.ipc.new_file(path, pa.schema([("text", pa.string())])) as file:
            file.write_table(pa.table({"text": texts}), max_chunksize=7)
    else:
        WRITERS[name](path, texts)
    part = local_file(path)
    data = path.read_bytes()
    path.unlink()

    @contextlib.contextmanager
    def open_remote(file):
        yield pa.PythonFile(io.BytesIO(data), "r")

    monkeypatch.setattr(formats, "open_source", open_remote)
    arrays = read_range(FileRange(file=part), Reading(separator="\n\n"), 100)
    assert [text for array in arrays for text in array.to_pylist()] == texts


def test_arrays_have_a_bounded_number_of_rows(tmp_path):
    texts = ["" if number % 3 else "x" for number in range(BATCH_DOCUMENTS + 10)]
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * len(texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        arrays = list(read_range(*cut_file(tmp_path / name), Reading(), 1 << 30))
        assert max(map(len, arrays)) <= BATCH_DOCUMENTS
        assert sum(map(len, arrays)) == len(texts)


def test_an_unknown_format_is_named():
    with pytest.raises(DataError, match=r"s3://bucket/a\.csv: unknown file format; takes \.txt"):
        check_format("s3://bucket/a.csv")
    check_format("s3://bucket/A.JSONL.GZ")


def test_a_file_that_has_changed_is_not_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    parts = cut_file(path)
    path.write_text("newer")
    with pytest.raises(DataError, match=r"a\.txt: changed"):
        rows(*parts)


PEAK = """
import sys
from pathlib import Path
import pyarrow as pa
from infini_model.data.sources.files import FileRange
from infini_model.data.sources.formats import Reading, read_range

def peak():
    # Not that of getrusage, which a process inherits from the one that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

part = FileRange.model_validate_json(sys.argv[1])
reading = Reading(separator="\\n\\n")
list(read_range(part.model_copy(update={"rows": 1}), reading))  # loads the code that is needed
before = peak()
size = sum(array.nbytes for array in read_range(part, reading))
print(size, peak() - before, pa.default_memory_pool().max_memory())
"""


def write_parquet_group(path: Path, texts: list[str]) -> None:
    # Neither compressed nor as a dictionary: the group is as large in the file as in memory.
    table = pa.table({"text": texts, "other": texts})
    pq.write_table(table, path, row_group_size=1 << 30, compression="none", use_dictionary=False)


def write_gzip(path: Path, texts: list[str]) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_text(path: Path, texts: list[str]) -> None:
    path.write_text("\n\n".join(texts))


def write_stream(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)


WRITERS = {
    "a.parquet": write_parquet_group,
    "a.jsonl.gz": write_gzip,
    "a.jsonl": write_lines,
    "a.txt": write_text,
    "a.arrow": write_stream,
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", WRITERS)
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    texts = [f"{number} " + "some words of text " * 500 for number in range(12_500)]
    WRITERS[name](tmp_path / name, texts)
    part = FileRange(file=local_file(tmp_path / name)).model_dump_json()
    command = [sys.executable, "-c", PEAK, part]
    # Arrow's own allocator keeps freed memory for a while.
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    size, peak, peak_of_arrow = map(int, out.stdout.split())
    assert size > 100 * MEGABYTE
    # Pages that a mapping has touched count as the process's, though the kernel may drop them.
    assert (peak_of_arrow if name == "a.arrow" else peak) < 64 * MEGABYTE
