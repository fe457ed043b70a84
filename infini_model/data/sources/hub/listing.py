"""The files of a hub dataset: which ones hold a split, and how much of them a limit takes.

`datasets` decides which files make up a configuration and a split. A revision is pinned to a
commit, whose files never change; their hashes come from the hub's listing, so no file is read. Only
the first file's schema is looked at and, for a limit, the footers up to the last row.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa

from infini_model.config import HubSource
from infini_model.data.sources.files import FileRange, SourceFile, open_source
from infini_model.data.sources.fingerprints import fingerprint
from infini_model.data.sources.formats import suffix
from infini_model.data.sources.hub.access import hub_errors, pin
from infini_model.data.sources.hub.opening import address_of
from infini_model.data.sources.pairs.arrays import columns_of
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache, fact_cache_here
from infini_model.runtime.records import Record, read_record, write_record

LISTING_VERSION = 1
# Names that the hub describes in one request.
PATHS_AT_ONCE = 500
# Footers or local files that are read at the same time.
FILES_AT_ONCE = 8
# Per module of `datasets` that reads plain files: the formats that have the same rows here.
PLAIN = {"parquet": (".parquet",), "json": (".jsonl", ".jsonl.gz", ".jsonl.zst")}
# Options of these modules that change no row of a text column.
HARMLESS_OPTIONS = (
    *("name", "version", "description", "data_dir", "data_files", "features"),
    *("batch_size", "chunksize", "fragment_scan_options"),
)


class HubListing(Record):
    """What `list_dataset` found at a commit."""

    ranges: list[FileRange] | None


@dataclass(frozen=True)
class Footer:
    """The end of a Parquet file: its schema and the number of rows in each row group."""

    file: SourceFile
    schema: pa.Schema
    groups: list[int]


def list_dataset(source: HubSource, datasets_dir: Path) -> list[FileRange] | None:
    """The files of a configuration and split, in the order in which `datasets` reads them.

    With a limit only as many files as it needs, the last up to its last row. None if the dataset is
    not made of plain Parquet or JSON lines files, or has a limit and is not Parquet: then it has to
    be streamed. None of its code is run. `source.repository` is a name on the hub or a local
    folder, whose files stay where they are.

    The listing of a commit, and the hashes of local files, are kept in `datasets_dir`: the next
    call only pins the revision.

    Raises `DataError` for a name, configuration, split, revision or column that does not exist, or
    a damaged file, `UnreachableError` if the hub does not answer.
    """
    facts = fact_cache_here(datasets_dir)
    if Path(source.repository).is_dir():
        ranges = _list(source, None, facts)
        facts.save()
        return ranges
    commit = pin(source)
    path = datasets_dir / ".listings" / "hub" / f"{_key(source, commit)}.json"
    with contextlib.suppress(DataError):  # missing or damaged
        return read_record(path, HubListing).ranges
    listing = HubListing(ranges=_list(source, commit, facts))
    write_record(path, listing)
    return listing.ranges


def _key(source: HubSource, commit: str) -> str:
    settings = source.model_dump(exclude={"revision", "min_characters", "pairs", "template"})
    settings |= {"pairs": True} if source.pairs else {}
    # Another version may order the files in another way.
    versions = [LISTING_VERSION, importlib.metadata.version("datasets")]
    return storage.content_key([versions, commit, settings])[:32]


def _list(source: HubSource, commit: str | None, facts: FactCache) -> list[FileRange] | None:
    names = _data_files(source, commit)
    if names is None:
        return None
    is_parquet = suffix(names[0]) == ".parquet"
    if source.limit is not None and not is_parquet:
        return None
    if commit is not None:
        describe = _hub_files(source, commit, names)
    else:
        describe = functools.cache(functools.partial(_local_file, facts))
    footer = functools.cache(functools.partial(_footer, describe))
    if is_parquet and not _holds_text(footer(names[0]).schema, source):
        return None
    with ThreadPoolExecutor(max_workers=FILES_AT_ONCE) as pool:
        if source.limit is None:
            return [FileRange(file=file) for file in pool.map(describe, names)]
        return list(_first_rows(names, source.limit, footer, pool))


def _data_files(source: HubSource, commit: str | None) -> list[str] | None:
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
    is_inside = commit is None or all(
        name.startswith(address_of(source.repository, commit, "")) for name in names
    )
    return names if names and is_inside and _is_plain(builder, names) else None


def _is_plain(builder: Any, names: Sequence[str]) -> bool:
    module = type(builder).__module__.rpartition(".")[2]
    formats = PLAIN.get(module, ())
    return all(suffix(name) in formats for name in names) and not any(
        field.name not in HARMLESS_OPTIONS and getattr(builder.config, field.name) != field.default
        for field in fields(builder.config)
    )


def _local_file(facts: FactCache, name: str) -> SourceFile:
    return fingerprint([name], facts)[0]


def _hub_files(source: HubSource, commit: str, names: Sequence[str]) -> Callable[[str], SourceFile]:
    """Describes each of these addresses, from the hub's listing."""
    from huggingface_hub import HfApi, RepoFile

    found: dict[str, SourceFile] = {}
    prefix = address_of(source.repository, commit, "")
    for start in range(0, len(names), PATHS_AT_ONCE):
        paths = [name.removeprefix(prefix) for name in names[start : start + PATHS_AT_ONCE]]
        with hub_errors(f"dataset {source.repository}"):
            infos = HfApi().get_paths_info(
                source.repository, paths, revision=commit, repo_type="dataset"
            )
        for info in infos:
            if isinstance(info, RepoFile):
                address = prefix + info.path
                found[address] = SourceFile(
                    address=address,
                    bytes=info.size,
                    fingerprint=_fingerprint(info),
                    version=commit,
                )
    return found.__getitem__


def _fingerprint(info: Any) -> str:
    """SHA-256 of a large file, equal wherever else the content lies; git's hash of a small one."""
    return f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"


def _footer(describe: Callable[[str], SourceFile], name: str) -> Footer:
    import pyarrow.parquet as pq

    file = describe(name)
    try:
        with open_source(file) as source, pq.ParquetFile(source) as opened:
            count, metadata = opened.num_row_groups, opened.metadata
            groups = [metadata.row_group(group).num_rows for group in range(count)]
            return Footer(file, opened.schema_arrow, groups)
    except pa.ArrowException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file.address}: cannot be read: {reason}") from error


def _holds_text(schema: pa.Schema, source: HubSource) -> bool:
    """Whether the column is text as it stands in a file; if not, `datasets` may convert it."""
    if source.pairs:
        columns_of(f"dataset {source.repository}", schema)
        return True
    if source.column not in schema.names:
        names = ", ".join(schema.names)
        raise DataError(
            f"dataset {source.repository}: has no column {source.column!r}; it has: {names}"
        )
    kind = schema.field(source.column).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(value) for test in tests)


def _first_rows(
    names: Sequence[str], limit: int, footer: Callable[[str], Footer], pool: ThreadPoolExecutor
) -> Iterator[FileRange]:
    """The files, in order, that hold the first `limit` rows."""
    left, position, largest = limit, 0, 0
    while left > 0 and position < len(names):
        # All of these are needed, unless one of them has more rows than any file before it.
        count = min(FILES_AT_ONCE, max(1, left // largest)) if largest else 1
        for found in pool.map(footer, names[position : position + count]):
            if left > 0:
                yield _head(found, left)
            rows = sum(found.groups)
            left, largest = left - rows, max(largest, rows)
        position += count


def _head(footer: Footer, rows: int) -> FileRange:
    """The first rows of a file, or all of it if it has no more."""
    ends = list(accumulate(footer.groups, initial=0))
    if ends[-1] <= rows:
        return FileRange(file=footer.file)
    return FileRange(file=footer.file, stop=bisect.bisect_left(ends, rows), rows=rows)
