"""Datasets of the hub: plain files by their addresses, what else there is streamed to local files.

A revision is pinned to a commit, whose files never change. `datasets` decides which files make up a
configuration and a split; none of the repository's code is run.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from infini_model.config import HubSource
from infini_model.data.sources.files import SourceFile, fingerprint
from infini_model.data.sources.formats import Reading, suffix, text_columns
from infini_model.data.sources.hub import address_of, hub_errors, pin_repository
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.records import Record, write_record
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

# Names that the hub describes in one request.
PATHS_AT_ONCE = 500
# Per module of `datasets` that reads plain files: the formats that have the same rows here.
PLAIN = {"parquet": (".parquet",), "json": (".jsonl", ".jsonl.gz", ".jsonl.zst")}
# Options of these modules that change no row of a text column.
HARMLESS_OPTIONS = (
    *("name", "version", "description", "data_dir", "data_files", "features"),
    *("batch_size", "chunksize", "fragment_scan_options"),
)
FILE_BYTES = 64 << 20
BATCH_ROWS = 64
COMPLETE, POSITION = "complete.json", b"position"


class HubDownload(Record):
    """The record of a complete download; `commit` is the revision that was read."""

    repository: str
    commit: str
    rows: int


class _Position(Record):
    """Where a stream stands: a state of `datasets`, after rows were `skipped`.

    `kind` names what can read the state.
    """

    kind: str
    skipped: int
    state: dict[str, Any] | None


def list_dataset(source: HubSource, facts: FactCache) -> list[SourceFile] | None:
    """The files of a configuration and split, in the order in which `datasets` reads them.

    None if they are not plain Parquet or JSON lines files, or a limit may end inside one: then the
    dataset has to be streamed. `source.repository` is a name on the hub, whose listing has the
    hashes of files, or a local folder, whose files stay where they are.

    Raises `DataError` for a name, configuration, split or revision that does not exist,
    `UnreachableError` if the hub does not answer.
    """
    if source.limit is not None:
        return None
    if Path(source.repository).is_dir():
        paths = _plain_files(source, None)
        return None if paths is None else fingerprint(paths, facts)
    commit = _pin(source)
    names = _plain_files(source, commit)
    return None if names is None else _describe(source.repository, commit, names)


def _plain_files(source: HubSource, commit: str | None) -> list[str] | None:
    """Paths or addresses of the split's files; None if they are not plain."""
    import datasets

    what = f"dataset {source.repository}"
    with hub_errors(what):
        builder = datasets.load_dataset_builder(
            source.repository, name=source.configuration, revision=commit
        )
    splits = builder.config.data_files
    if not isinstance(splits, dict):
        return None
    if source.split not in splits:
        # `all` and `train+test` are several splits.
        if source.split == "all" or not re.fullmatch(r"[\w.-]+", source.split):
            return None
        raise DataError(
            f"{what}: has no split {source.split!r}; it has: {', '.join(map(str, splits))}"
        )
    names = [str(name) for name in splits[source.split]]
    inside = "" if commit is None else address_of(source.repository, commit, "")
    formats = PLAIN.get(type(builder).__module__.rpartition(".")[2], ())
    is_plain = all(name.startswith(inside) and suffix(name) in formats for name in names)
    options = (each for each in fields(builder.config) if each.name not in HARMLESS_OPTIONS)
    is_plain &= all(getattr(builder.config, each.name) == each.default for each in options)
    return names if names and is_plain else None


def _describe(repository: str, commit: str, names: list[str]) -> list[SourceFile]:
    from huggingface_hub import HfApi, RepoFile

    found: dict[str, SourceFile] = {}
    prefix = address_of(repository, commit, "")
    for start in range(0, len(names), PATHS_AT_ONCE):
        paths = [name.removeprefix(prefix) for name in names[start : start + PATHS_AT_ONCE]]
        with hub_errors(f"dataset {repository}"):
            infos = HfApi().get_paths_info(repository, paths, revision=commit, repo_type="dataset")
        for info in infos:
            if isinstance(info, RepoFile):
                # The SHA-256 of a large file, wherever else the content lies; git's hash of others.
                content = f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"
                address = prefix + info.path
                found[address] = SourceFile(
                    address=address, bytes=info.size, fingerprint=content, version=commit
                )
    return [found[name] for name in names]


def fetch_dataset(
    source: HubSource,
    raw_dir: Path,
    progress: OnProgress | None = None,
    *,
    file_bytes: int = FILE_BYTES,
    batch_rows: int = BATCH_ROWS,
) -> list[Path]:
    """Stream a dataset's columns of text into Parquet files under `raw_dir`; returns them in order.

    The folder is keyed by all that decides the rows. A complete download is never repeated; a
    killed one resumes after its last file, at the place that this file notes. A file is closed once
    it holds `file_bytes`, read `batch_rows` at a time.

    Raises `DataError` for a name, configuration, split, revision or column that does not exist,
    `UnreachableError` if the hub does not answer, `UserError` on a full disk.
    """
    folder = Path(source.repository)
    is_local = folder.is_dir()
    commit = _hash_of(folder) if is_local else _pin(source)
    decides = [source.repository, source.configuration, source.split, commit, source.column]
    key = storage.content_key([*decides, source.limit, *(["pairs"] if source.pairs else [])])[:32]
    target = raw_dir / key
    with storage.lock(raw_dir / ".locks" / key):
        if not (target / COMPLETE).is_file():
            storage.remove_leftovers(storage.make_folder(target))
            revision = None if is_local else commit
            rows = _stream(source, revision, target, progress, file_bytes, batch_rows)
            record = HubDownload(repository=source.repository, commit=commit, rows=rows)
            write_record(target / COMPLETE, record)
            log.info("%s: %d rows of commit %s", source.repository, rows, commit)
        return _parts(target)


def _pin(source: HubSource) -> str:
    return pin_repository(source.repository, source.revision, "dataset")


def _hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {storage.sha256(path)}\n".encode())
    return digest.hexdigest()


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _stream(
    source: HubSource,
    revision: str | None,
    folder: Path,
    progress: OnProgress | None,
    file_bytes: int,
    batch_rows: int,
) -> int:
    """Write the files that are still missing; returns the number of rows in all files."""
    import datasets
    import pyarrow.parquet as pq

    what, parts = f"dataset {source.repository}", _parts(folder)
    reading = Reading(source.column, template=source.template if source.pairs else None)
    rows: int = sum(pq.read_metadata(path).num_rows for path in parts)
    done = sum(path.stat().st_size for path in parts)
    position = _position(parts, rows, f"datasets {datasets.__version__}, {batch_rows} rows at once")
    with hub_errors(what):
        stream = _open_stream(source, revision, position)
        batches = iter(stream.iter(batch_size=batch_rows))
    pending: list[pa.Table] = []
    size, is_open = 0, True
    while is_open:
        with hub_errors(what):
            table = next(batches, None)
        is_open = table is not None
        if table is not None:
            pending.append(table.select(text_columns(what, table.schema, reading)))
            rows += table.num_rows
            size += pending[-1].nbytes
            done += pending[-1].nbytes
            if progress is not None:
                progress(done, done)
        if pending and (size >= file_bytes or not is_open):
            here = position.model_copy(update={"state": stream.state_dict()})
            whole = pa.concat_tables(pending, promote_options="default")
            whole = whole.replace_schema_metadata({POSITION: here.model_dump_json()})
            with storage.atomic_file(folder / f"part-{len(_parts(folder)):05d}.parquet") as part:
                pq.write_table(whole, part, compression="zstd")
            pending, size = [], 0
    if not rows:
        raise DataError(f"{what}: split {source.split} has no rows")
    return rows


def _position(parts: list[Path], rows: int, kind: str) -> _Position:
    """Where the last file ends: as it notes it, or after all rows if that is of another kind."""
    import pyarrow.parquet as pq

    noted = (pq.read_schema(parts[-1]).metadata or {}).get(POSITION) if parts else None
    position = _Position.model_validate_json(noted) if noted else None
    if position is not None and position.kind == kind:
        return position
    return _Position(kind=kind, skipped=rows, state=None)


def _open_stream(source: HubSource, revision: str | None, position: _Position) -> Any:
    import datasets

    stream = datasets.load_dataset(
        source.repository,
        name=source.configuration,
        split=source.split,
        revision=revision,
        streaming=True,
    )
    if position.skipped:
        stream = stream.skip(position.skipped)
    if source.limit is not None:
        stream = stream.take(source.limit - position.skipped)
    stream = stream.with_format("arrow")
    if position.state is not None:
        stream.load_state_dict(position.state)
    return stream
