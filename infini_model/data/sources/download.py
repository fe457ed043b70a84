"""The download stage: find the source files, download and fingerprint them, read them once."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infini_model.config import MEBIBYTE, DataConfig, FilesSource, HubSource
from infini_model.data.manifest import Corpus, RawFile
from infini_model.data.sources import corpus
from infini_model.data.sources.documents import Progress
from infini_model.data.sources.formats import Reading, check_format
from infini_model.data.threads import thread_count
from infini_model.runtime import storage
from infini_model.runtime.cores import available_cores
from infini_model.runtime.errors import DataError

STDLIB = "{stdlib}"
# Folders below the standard library that are not part of it.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def download(config: DataConfig, output_dir: Path, *, progress: Progress | None = None) -> Corpus:
    """Download what is missing, then read every document once and fingerprint the corpus.

    Remote files and hub datasets are downloaded to `<output_dir>/raw/`, once, resuming earlier
    attempts; local files are read in place. `progress(done, total)` counts bytes, first of the
    downloads, then of the files read.

    Raises `DataError` in one line that names the file, the row, the column or the address;
    `SourceUnreachableError` if a retry may help; `UserError` on a full disk.
    """
    raw_dir = output_dir / "raw"
    if isinstance(config.source, HubSource):
        from infini_model.data.sources.hub import fetch_dataset

        paths = fetch_dataset(config.source, raw_dir, progress)
    else:
        paths = list_files(config.source, raw_dir, progress)
    return corpus.scan(
        fingerprint(paths),
        reading_of(config),
        config.partition_megabytes * MEBIBYTE,
        _corpora_dir(output_dir),
        thread_count(config.workers),
        progress,
    )


def _corpora_dir(output_dir: Path) -> Path:
    return output_dir / "datasets" / ".corpora"


def spill_folder(found: Corpus, config: DataConfig, output_dir: Path) -> Path:
    """Where `download` with these arguments leaves the spill of the text, if it reads any."""
    partition_bytes = config.partition_megabytes * MEBIBYTE
    return corpus.spill_folder(
        found.files, reading_of(config), partition_bytes, _corpora_dir(output_dir)
    )


def reading_of(config: DataConfig) -> Reading:
    """The settings of a source that decide its documents."""
    source = config.source
    if isinstance(source, FilesSource):
        return Reading(source.column, source.errors, source.min_characters, source.separator)
    return Reading(source.column, "fail", source.min_characters)


def list_files(source: FilesSource, raw_dir: Path, progress: Progress | None = None) -> list[Path]:
    """The files that the source's globs and addresses match, each once, sorted.

    Raises `DataError` if a glob matches nothing or a file has an unknown extension.
    """
    found: set[Path] = set()
    addresses: list[str] = []
    for pattern in source.paths:
        if "://" in pattern:
            addresses.append(pattern)
        else:
            found.update(_expand(pattern))
    for path in sorted(found):
        check_format(path)
    if addresses:
        from infini_model.data.sources.remote import fetch_files

        found.update(fetch_files(addresses, raw_dir, progress))
    return sorted(found)


def _expand(pattern: str) -> Iterator[Path]:
    """The files that a glob matches. `{stdlib}` is the folder of Python's standard library."""
    if pattern.startswith(STDLIB):
        files = _stdlib_files(pattern.removeprefix(STDLIB).lstrip("/"))
    else:
        expanded = os.path.expanduser(pattern)  # noqa: PTH111 -- a pattern is not a path
        files = _glob(expanded)
    if not files:
        is_folder = Path(pattern).expanduser().is_dir()
        hint = f"; it is a folder: write {pattern.rstrip('/')}/**/*.txt" if is_folder else ""
        raise DataError(f"data.source.paths: {pattern!r} matches no file{hint}")
    return iter(path.absolute() for path in files)


def _glob(pattern: str) -> list[Path]:
    matches = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207
    return [path for path in matches if path.is_file()]


def _stdlib_files(pattern: str) -> list[Path]:
    """The files that `pattern` matches in the standard library, without installed packages.

    A leading `**/` is expanded per subfolder, since walking all installed packages would take
    longer than reading the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    start = glob.escape(str(root))
    patterns = [f"{start}/{pattern}"]
    if pattern.startswith("**/"):
        tail = pattern.removeprefix("**/")
        children = [glob.escape(str(path)) for path in root.iterdir() if path.is_dir()]
        below = [f"{child}/{pattern}" for child in children if Path(child).name not in NOT_STDLIB]
        patterns = [f"{start}/{tail}", *below]
    found = [path for each in patterns for path in _glob(each)]
    return [path for path in found if not NOT_STDLIB & set(path.relative_to(root).parts)]


def fingerprint(paths: list[Path]) -> list[RawFile]:
    """Size and SHA-256 of each file. Raises `DataError` that names an unreadable file."""

    def one(path: Path) -> RawFile:
        try:
            return RawFile(path=path, bytes=path.stat().st_size, sha256=storage.sha256(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error

    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        return list(pool.map(one, paths))
