"""The Hugging Face hub: commits, datasets, tokenizers and weights.

A revision is pinned to a commit, whose files never change. Of a dataset, plain files are listed by
their addresses, or else those into which the hub has converted it. `datasets` decides which files
make up a configuration and a split; none of the repository's code is run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from infini_model.config import HubSource
from infini_model.data.sources.files import (
    HUB,
    FileRange,
    SourceFile,
    file_errors,
    hub_errors,
    open_source,
)
from infini_model.data.sources.formats import format_of, whole_file
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
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
# The branch of the Parquet files into which the hub converts the newest commit of a dataset.
CONVERTED = "refs/convert/parquet"
TIMEOUT = 60.0  # seconds
# Neither pickles nor code; copies in other layouts are in folders of their own.
WEIGHTS = (".safetensors", ".json", ".jinja")
# The name that `snapshot_download` gives its bar of the bytes that are written.
BYTES_BAR = "huggingface_hub.snapshot_download"


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


def list_dataset(source: HubSource) -> list[FileRange]:
    """The files of a configuration and split, in the order in which `datasets` reads them.

    The hub's listing has the hashes of files. Plain Parquet and JSON files stay where they are;
    with a `limit`, so do the Parquet files that have the first rows. Of all else, the hub's Parquet
    copy is listed.

    Raises `DataError` for a name, configuration, split or revision that does not exist and for
    files without a copy, `UnreachableError` if the hub does not answer.
    """
    import datasets

    name = source.repository
    commit = pin_repository(name, source.revision, "dataset")
    with hub_errors(f"dataset {name}"):
        builder = datasets.load_dataset_builder(name, source.configuration, revision=commit)
    splits = _chosen_splits(source, builder)
    plain = _describe(name, commit, _plain_files(source, commit, builder, splits))
    if first := first_rows(plain, source.limit):
        return first
    converted = _converted_files(source, commit, builder.config.name, splits)
    return first_rows(converted, source.limit) or []


def first_rows(files: Sequence[SourceFile], limit: int | None) -> list[FileRange] | None:
    """The files with the first `limit` rows, or all; None if one of them cannot be cut by rows."""
    import pyarrow.parquet as pq

    ranges, found = list(map(whole_file, files)), list[FileRange]()
    if limit is None:
        return ranges
    while limit > 0 and len(found) < len(ranges):
        part = ranges[len(found)]
        if part.format != "parquet":
            return None
        with file_errors(part.file.address), open_source(part.file, whole=False) as opened:
            rows = pq.read_metadata(opened).num_rows
        cut = {"rows": limit, "whole": False} if limit < rows else {}
        found.append(part.model_copy(update=cut))
        limit -= rows
    return found


def _chosen_splits(source: HubSource, builder: Any) -> list[str]:
    """The splits to read: one, several such as `train+test`, or `all`."""
    present = list(map(str, builder.config.data_files or ()))
    chosen = present if source.split == "all" else re.split(r"\s*\+\s*", source.split)
    for split in chosen:
        if split not in present:
            what = f"data.source.split: dataset {source.repository}: has no split {split!r}"
            hint = "; data.source.limit reads the first rows of one" if "[" in split else ""
            raise DataError(f"{what}; it has: {', '.join(present)}{hint}")
    return chosen


def _plain_files(source: HubSource, commit: str, builder: Any, splits: Sequence[str]) -> list[str]:
    """Return the addresses of the splits' files; none if they are not plain."""
    names = [str(name) for split in splits for name in builder.config.data_files[split]]
    inside = f"{HUB}{source.repository}@{commit}/"
    formats = PLAIN.get(type(builder).__module__.rpartition(".")[2], ())
    is_plain = all(name.startswith(inside) and format_of(name) in formats for name in names)
    options = (each for each in fields(builder.config) if each.name not in HARMLESS_OPTIONS)
    is_plain &= all(getattr(builder.config, each.name) == each.default for each in options)
    return names if is_plain else []


def _converted_files(
    source: HubSource, commit: str, configuration: str, splits: Sequence[str]
) -> list[SourceFile]:
    """The Parquet files into which the hub itself has converted the splits of its newest commit."""
    from huggingface_hub import HfApi, HfFileSystem

    name = source.repository
    what = f"dataset {name}: is read in place only from Parquet or, without data.source.limit, JSON"
    with hub_errors(f"dataset {name}"):
        refs = HfApi().list_repo_refs(name, repo_type="dataset")
        commits = {each.ref: each.target_commit for each in (*refs.branches, *refs.converts)}
        if source.revision and commit != commits.get("refs/heads/main"):
            raise DataError(f"{what}; the newest data.source.revision alone has a Parquet copy")
        copy = commits.get(CONVERTED, "")
        root = f"{HUB}{name}@{copy}/{configuration}"
        paths = HfFileSystem().find(root) if copy else []
    addresses: list[str] = []
    for split in splits:
        found = [
            each for each in paths if re.search(rf"/(partial-)?{re.escape(split)}/[^/]+$", each)
        ]
        if not found:
            raise DataError(
                f"{what}, and the hub has no Parquet copy of {configuration}/{split}: download "
                "its files and use data.source.kind=files"
            )
        if "/partial-" in found[0]:
            log.warning(
                "dataset %s: the hub has converted only the first part of split %r to Parquet; a "
                "larger data.source.limit, or none, reads no more",
                *(name, split),
            )
        addresses += (f"hf://{each}" for each in found)
    return _describe(name, copy, addresses)


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


def fetch_tokenizer(name: str, files: Sequence[str]) -> Path:
    """The folder of a model in the hub's local cache, with those of `files` that it has.

    `name` may end in `@revision`. Raises `DataError` if the model does not exist,
    `UnreachableError` if the hub does not answer.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    with hub_errors(f"tokenizer {name}"):
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
        )


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
