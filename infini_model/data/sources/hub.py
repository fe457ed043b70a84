"""The Hugging Face hub: commits, datasets, tokenizers and weights.

A revision is pinned to a commit, whose files never change. Of a dataset, plain files are listed by
their addresses; what else there is, is streamed to local files. `datasets` decides which files make
up a configuration and a split; none of the repository's code is run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from infini_model.config import HubSource
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.sources.conversations import Conversations
from infini_model.data.sources.files import (
    HUB,
    FileRange,
    SourceFile,
    file_errors,
    hub_errors,
    local_files,
    open_source,
)
from infini_model.data.sources.formats import format_of, whole_file
from infini_model.data.sources.rows import Reading, path_in, text_columns
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.fact_cache import FactCache
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

# Names that the hub describes in one request.
PATHS_AT_ONCE = 500
# Per module of `datasets` that reads plain files: the formats that have the same rows here.
PLAIN = {
    "parquet": ("parquet",),
    "json": ("jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "json.zst"),
}
# Options of these modules that change no row of a text column.
HARMLESS_OPTIONS = (
    *("name", "version", "description", "data_dir", "data_files", "features"),
    *("batch_size", "chunksize", "fragment_scan_options"),
)
# A streamed file is closed once it holds this much, read so many rows at a time.
FILE_BYTES = 64 << 20
BATCH_ROWS = 64
PARTS, COMPLETE, POSITION = "part-*.parquet", "complete.json", b"position"
TIMEOUT = 60.0  # seconds
# Neither pickles nor code; copies in other layouts are in folders of their own.
WEIGHTS = (".safetensors", ".json", ".jinja")
# The name that `snapshot_download` gives its bar of the bytes that are written.
BYTES_BAR = "huggingface_hub.snapshot_download"


def split_revision(name: str) -> tuple[str, str | None]:
    """The repository and the revision, if any, of a name such as `team/model@main`."""
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


def pin_repository(repository: str, revision: str | None, kind: Literal["dataset", "model"]) -> str:
    """The commit that a revision points at now, by default that of the default branch.

    The hub is not asked about a commit. Raises `DataError` for a repository or a revision that does
    not exist or may not be read, `UnreachableError` if the hub does not answer.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    api, what = HfApi(), f"{kind} {repository}"
    with hub_errors(what):
        try:
            found = api.repo_info(repository, revision=revision, repo_type=kind, timeout=TIMEOUT)
        except RevisionNotFoundError as error:
            refs = api.list_repo_refs(repository, repo_type=kind)
            names = ", ".join(ref.name for ref in (*refs.branches, *refs.tags))
            raise DataError(f"{what}: has no revision {revision!r}; it has: {names}") from error
    return str(found.sha)


def list_dataset(
    source: HubSource, raw_dir: Path, facts: FactCache, progress: OnProgress | None = None
) -> list[FileRange]:
    """The files of a configuration and split, in the order in which `datasets` reads them.

    `source.repository` is a name on the hub, whose listing has the hashes of files, or a local
    folder. Plain Parquet and JSON files stay where they are; with a `limit`, so do the Parquet
    files that have the first rows, if they are several. Others are streamed to Parquet files below
    `raw_dir`, in a folder keyed by all that decides the rows: a complete download is never
    repeated, a killed one resumes after its last file.

    Raises `DataError` for a name, configuration, split, revision or column that does not exist,
    `UnreachableError` if the hub does not answer, `UserError` on a full disk.
    """
    commit = None
    if not Path(source.repository).is_dir():
        commit = pin_repository(source.repository, source.revision, "dataset")
    if paths := _plain_files(source, commit):
        if commit is None:
            files = local_files(paths, facts)
        else:
            files = _describe(source.repository, commit, paths)
        ranges = list(map(whole_file, files))
        if source.limit is None:
            return ranges
        if first := _first_rows(ranges, source.limit):
            return first
    return list(map(whole_file, local_files(_fetch(source, commit, raw_dir, progress), facts)))


def _first_rows(files: Sequence[FileRange], limit: int) -> list[FileRange] | None:
    """The files with the first `limit` rows; None if one file has them, or one is not Parquet.

    Reads footers. A file on the hub is fetched whole, so a part of a single one is better streamed.
    """
    import pyarrow.parquet as pq

    found: list[FileRange] = []
    while limit > 0 and len(found) < len(files):
        part = files[len(found)]
        if part.format != "parquet":
            return None
        with file_errors(part.file.address), open_source(part.file, whole=False) as opened:
            rows = pq.read_metadata(opened).num_rows
        found.append(part if rows <= limit else part.model_copy(update={"rows": limit}))
        limit -= rows
    return found if len(found) > 1 else None


def _builder(source: HubSource, commit: str | None) -> Any:
    import datasets

    name, configuration = source.repository, source.configuration
    with hub_errors(f"dataset {name}"):
        return datasets.load_dataset_builder(name, configuration, revision=commit)


def _plain_files(source: HubSource, commit: str | None) -> list[str] | None:
    """Paths or addresses of the split's files; None if they are not plain."""
    builder = _builder(source, commit)
    splits = builder.config.data_files
    if not isinstance(splits, dict):
        return None
    if source.split not in splits:
        # `all` and `train+test` are several splits.
        if source.split == "all" or not re.fullmatch(r"[\w.-]+", source.split):
            return None
        what, present = f"dataset {source.repository}", ", ".join(map(str, splits))
        raise DataError(f"{what}: has no split {source.split!r}; it has: {present}")
    names = [str(name) for name in splits[source.split]]
    inside = "" if commit is None else f"{HUB}{source.repository}@{commit}/"
    formats = PLAIN.get(type(builder).__module__.rpartition(".")[2], ())
    is_plain = all(name.startswith(inside) and format_of(name) in formats for name in names)
    options = (each for each in fields(builder.config) if each.name not in HARMLESS_OPTIONS)
    is_plain &= all(getattr(builder.config, each.name) == each.default for each in options)
    return names if names and is_plain else None


def _describe(repository: str, commit: str, addresses: list[str]) -> list[SourceFile]:
    from huggingface_hub import HfApi, RepoFile

    found: dict[str, SourceFile] = {}
    root = f"{HUB}{repository}@{commit}/"
    for start in range(0, len(addresses), PATHS_AT_ONCE):
        paths = [each.removeprefix(root) for each in addresses[start : start + PATHS_AT_ONCE]]
        with hub_errors(f"dataset {repository}"):
            infos = HfApi().get_paths_info(repository, paths, revision=commit, repo_type="dataset")
        for info in infos:
            if isinstance(info, RepoFile):
                # The SHA-256 of a large file, wherever else the content lies; git's hash of others.
                content = f"sha256:{info.lfs.sha256}" if info.lfs else f"git:{info.blob_id}"
                found[root + info.path] = SourceFile(
                    address=root + info.path, bytes=info.size, fingerprint=content, version=commit
                )
    return [found[address] for address in addresses]


def _fetch(
    source: HubSource, commit: str | None, raw_dir: Path, progress: OnProgress | None
) -> list[str]:
    """The Parquet files that hold the columns of text of a dataset, in order."""
    version = commit or _hash_of(Path(source.repository))
    decides = [source.repository, source.configuration, source.split, version, source.column]
    chats = ["conversations", *source.columns] if source.pairs else []
    key = storage.content_key([*decides, source.limit, *chats])[:32]
    folder = raw_dir / key
    with storage.lock(raw_dir / ".locks" / key):
        if not (folder / COMPLETE).is_file():
            storage.remove_leftovers(storage.make_folder(folder))
            rows = _stream(source, commit, folder, progress)
            record = {"repository": source.repository, "commit": version, "rows": rows}
            storage.write_json(folder / COMPLETE, record)
            log.info("%s: %d rows of commit %s", source.repository, rows, version)
    return sorted(map(str, folder.glob(PARTS)))


def _hash_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return storage.content_key(
        [[str(path.relative_to(folder)), storage.sha256(path)] for path in files]
    )


def _stream(
    source: HubSource, commit: str | None, folder: Path, progress: OnProgress | None
) -> int:
    """Write the files that are still missing; returns the number of rows in all files.

    Each notes the state of the stream at its end, which only the same version of `datasets` reads.
    """
    import datasets
    import pyarrow.parquet as pq

    what, parts = f"dataset {source.repository}", sorted(folder.glob(PARTS))
    chats = Conversations(ChatTemplate(""), columns=tuple(source.columns))
    reading = Reading(source.column, conversations=chats if source.pairs else None)
    rows: int = sum(pq.read_metadata(path).num_rows for path in parts)
    done = sum(path.stat().st_size for path in parts)
    place: dict[str, Any] = {"version": datasets.__version__, "skipped": rows, "state": None}
    if parts:
        noted = json.loads(pq.read_schema(parts[-1]).metadata[POSITION])
        place = noted if noted.get("version") == place["version"] else place
    with hub_errors(what):
        stream = _builder(source, commit).as_streaming_dataset(source.split)
        if place["skipped"]:
            stream = stream.skip(place["skipped"])
        if source.limit is not None:
            stream = stream.take(source.limit - place["skipped"])
        stream = stream.with_format("arrow")
        if place["state"] is not None:
            stream.load_state_dict(place["state"])
        batches = iter(stream.iter(batch_size=BATCH_ROWS))

    def selected(batch: pa.Table) -> pa.Table:
        columns = text_columns(what, batch.schema, reading)
        return batch.select([path_in(batch.schema, column)[0] for column in columns])

    tables = map(selected, batches)
    for number, table in enumerate(_gather(what, tables, done, progress), len(parts)):
        note = {POSITION: json.dumps(place | {"state": stream.state_dict()})}
        with storage.atomic_file(folder / f"part-{number:05d}.parquet") as part:
            pq.write_table(table.replace_schema_metadata(note), part, compression="zstd")
        rows += table.num_rows
    if not rows:
        raise DataError(f"{what}: split {source.split} has no rows")
    return rows


def _gather(
    what: str, batches: Iterator[pa.Table], done: int, progress: OnProgress | None
) -> Iterator[pa.Table]:
    """Tables of at least `FILE_BYTES`, but for the last; `done` bytes came before them."""
    pending: list[pa.Table] = []
    size, is_open = 0, True
    while is_open:
        with hub_errors(what):
            batch = next(batches, None)
        is_open = batch is not None
        if batch is not None:
            pending.append(batch)
            size += batch.nbytes
            done += batch.nbytes
            if progress is not None:
                progress(done, done)
        # Before the next batch is read, since the state of the stream is noted now.
        if pending and (size >= FILE_BYTES or not is_open):
            yield pa.concat_tables(pending, promote_options="default")
            pending, size = [], 0


def fetch_tokenizer(name: str, files: Sequence[str]) -> Path:
    """The folder of a model in the hub's local cache, with those of `files` that it has.

    `name` may end in `@revision`. Raises `DataError` if the model does not exist,
    `UnreachableError` if the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(name)
    with hub_errors(f"tokenizer {name}"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))


def fetch_weights(repository: str, commit: str, progress: OnProgress | None = None) -> Path:
    """The folder of a model's safetensors and JSON files, in the hub's local cache.

    What is there already is not fetched again, nor is the hub asked for it; `progress(done, total)`
    counts its bytes as done.

    Raises `DataError` if the model does not exist or has no safetensors, `UnreachableError` if the
    hub does not answer, `UserError` on a full disk.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    with hub_errors(f"model {repository}"), storage.named_os_errors(cache):
        _remove_leftovers(cache, repository)
        folder = snapshot_download(
            repository,
            revision=commit,
            allow_patterns=[f"*{suffix}" for suffix in WEIGHTS],
            ignore_patterns=["*/*"],
            tqdm_class=None if progress is None else _bars(repository, commit, progress),
        )
    if not any(Path(folder).glob("*.safetensors")):
        raise DataError(
            f"model {repository}: has no .safetensors files at {commit[:12]}; weights in other "
            "formats, such as .bin, are not read"
        )
    return Path(folder)


def _remove_leftovers(cache: Path, repository: str) -> None:
    """Remove what killed downloads of a model have left: the hub's client never resumes them."""
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repository, repo_type="model")
    for path in (cache / folder / "blobs").glob("*.incomplete"):
        # Whoever downloads a file, also another program, holds the lock of its entity tag.
        lock = cache / ".locks" / folder / f"{path.name.partition('.')[0]}.lock"
        # In a cache that several users share, it may be another one's to remove.
        with contextlib.suppress(OSError, UserError), storage.lock(lock, wait=False) as free:
            if free:
                path.unlink()


def _bars(repository: str, commit: str, progress: OnProgress) -> type[Any]:
    """A class for the bars of `snapshot_download`: it draws none and reports the bytes."""
    from huggingface_hub import get_cached_repo_tree, try_to_load_from_cache
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]
            self._done = self._all = 0
            # The bar's own total grows as one file after the other is begun.
            for file in get_cached_repo_tree(repository, revision=commit):
                if "/" not in file.path and file.path.endswith(WEIGHTS):
                    here = try_to_load_from_cache(repository, file.path, revision=commit)
                    self._all += file.size
                    self._done += file.size if isinstance(here, str) else 0
            self._counts = name == BYTES_BAR

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                with self.get_lock():
                    self._done += int(n or 0)
                    progress(self._done, max(self._done, self._all))

    return Bar
