"""Hub datasets that are not plain files, such as archives or CSV: streamed to local Parquet files.

A dataset is streamed into files of bounded size. Its revision is first pinned to a commit, and the
folder is keyed by that and everything else that decides the rows. A killed download resumes after
its last complete file; a complete download is never repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from infini_model.config import HubSource
from infini_model.data.sources.documents import Progress
from infini_model.data.sources.hub.access import hub_errors, pin
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.records import Record, read_record, write_record

log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
BATCH_ROWS = 64
COMPLETE = "complete.json"


class HubDownload(Record):
    """The record of a complete download; `commit` is the revision that was read."""

    repository: str
    configuration: str | None
    split: str
    column: str
    limit: int | None
    commit: str
    rows: int
    files: list[str]


def fetch_dataset(
    source: HubSource,
    raw_dir: Path,
    progress: Progress | None = None,
    *,
    file_bytes: int = FILE_BYTES,
    batch_rows: int = BATCH_ROWS,
) -> list[Path]:
    """Stream a dataset's text column into Parquet files under `raw_dir`; returns them in order.

    `source.repository` is a name on the hub or a local folder; none of its code is run. A file is
    closed once it holds `file_bytes` of text, read `batch_rows` at a time.

    Raises `DataError` for a name, configuration, split, revision or column that does not exist,
    `UnreachableError` if the hub does not answer, `UserError` on a full disk.
    """
    commit = pin(source)
    ingredients = [
        source.repository,
        source.configuration,
        source.split,
        commit,
        source.column,
        source.limit,
    ]
    key = storage.content_key(ingredients)[:32]
    folder = raw_dir / key
    with storage.lock(raw_dir / ".locks" / key):
        if not (folder / COMPLETE).is_file():
            storage.remove_leftovers(storage.make_folder(folder))
            rows = _stream(source, commit, folder, progress, file_bytes, batch_rows)
            record = HubDownload(
                **source.model_dump(include={"repository", "configuration", "split"}),
                **source.model_dump(include={"column", "limit"}),
                commit=commit,
                rows=rows,
                files=[path.name for path in _files(folder)],
            )
            write_record(folder / COMPLETE, record)
            log.info("%s: %d rows of commit %s", source.repository, rows, commit)
        files = read_record(folder / COMPLETE, HubDownload).files
    return [folder / name for name in files]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _stream(
    source: HubSource,
    commit: str,
    folder: Path,
    progress: Progress | None,
    file_bytes: int,
    batch_rows: int,
) -> int:
    """Write the files that are still missing; returns the number of rows in all files."""
    import pyarrow.parquet as pq

    existing = _files(folder)
    rows: int = sum(pq.read_metadata(path).num_rows for path in existing)
    done = sum(path.stat().st_size for path in existing)
    pending: list[pa.Array] = []
    size = 0

    def write() -> None:
        nonlocal pending, size
        target = folder / f"part-{len(_files(folder)):05d}.parquet"
        with storage.atomic_file(target) as temporary:
            pq.write_table(
                pa.table({source.column: pa.chunked_array(pending)}), temporary, compression="zstd"
            )
        pending, size = [], 0

    for texts in _texts(source, commit, rows, batch_rows):
        pending.append(texts)
        rows += len(texts)
        size += texts.nbytes
        done += texts.nbytes
        if progress is not None:
            progress(done, done)
        if size >= file_bytes:
            write()
    if pending:
        write()
    if not rows:
        raise DataError(f"dataset {source.repository}: split {source.split} has no rows")
    return rows


def _texts(source: HubSource, commit: str, skip: int, batch_rows: int) -> Iterator[pa.Array]:
    """The column from row `skip` on, `batch_rows` at a time, as large strings."""
    what = f"dataset {source.repository}"
    left = None if source.limit is None else source.limit - skip
    if left == 0:
        return
    with hub_errors(what):
        rows = _open_stream(source, commit).skip(skip)
        tables = (rows if left is None else rows.take(left)).with_format("arrow")
        batches = iter(tables.iter(batch_size=batch_rows))
    while True:
        with hub_errors(what):
            table = next(batches, None)
        if table is None:
            return
        if source.column not in table.column_names:
            names = ", ".join(table.column_names)
            raise DataError(f"{what}: has no column {source.column!r}; it has: {names}")
        column = table.column(source.column)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise DataError(f"{what}: column {source.column!r} is {column.type}, not text")
        yield column.cast(pa.large_string()).combine_chunks()


def _open_stream(source: HubSource, commit: str) -> Any:
    import datasets

    local = Path(source.repository).is_dir()
    return datasets.load_dataset(
        source.repository,
        name=source.configuration,
        split=source.split,
        revision=None if local else commit,
        streaming=True,
    )
