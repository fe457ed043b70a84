"""The download stage: list the files of a source by what identifies their content."""

from __future__ import annotations

import dataclasses
import glob
import os
import sysconfig
from contextlib import AbstractContextManager
from pathlib import Path

from infini_model.config import DataConfig, FilesSource, HubSource
from infini_model.config.locations import is_store
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.files import FileRange, Listing, SourceFile, fingerprint
from infini_model.data.sources.formats import Reading, check_format
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import fact_cache_here
from infini_model.runtime.object_store import ObjectStore, StoredObject, matching
from infini_model.runtime.stage_protocol import OnProgress

STDLIB = "{stdlib}"
# Folders below the standard library that are not part of it.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def download(
    config: DataConfig,
    output_dir: Path,
    *,
    datasets_dir: Path | None = None,
    progress: OnProgress | None = None,
) -> Listing:
    """List the files of the source with their fingerprints; download those that need it.

    Files at http addresses, and hub datasets that are streamed, are downloaded to
    `<output_dir>/raw/`, once, resuming earlier attempts. All others, also those in object stores,
    are read later. A local file is only read for its checksum, and only if it is new or was written
    since. `progress(done, total)` counts the bytes of the downloads.

    Raises `DataError` in one line that names the file or the address; `UnreachableError` if a
    retry may help; `UserError` on a full disk.
    """
    facts = fact_cache_here(datasets_dir or output_dir / "datasets")
    raw_dir = output_dir / "raw"
    if isinstance(config.source, HubSource):
        from infini_model.data.sources.hub import list_dataset

        found = list_dataset(config.source, raw_dir, facts, progress)
    else:
        paths = list_files(config.source, raw_dir, progress)
        stored = {
            file.address: file
            for pattern in filter(is_store, config.source.paths)
            for file in list_objects(pattern)
        }
        found = [*(stored[address] for address in sorted(stored)), *fingerprint(paths, facts)]
    facts.save()
    return Listing(ranges=[FileRange(file=file) for file in found])


def using_raw_files(output_dir: Path) -> AbstractContextManager[bool]:
    """The lock to hold while files in `<output_dir>/raw/` are needed that no listing names yet."""
    return storage.lock(raw_files_lock(output_dir), shared=True)


def raw_files_lock(output_dir: Path) -> Path:
    """Held exclusively by whoever removes downloaded files, for moments only."""
    return output_dir / "raw" / ".lock"


def reading_of(config: DataConfig) -> Reading:
    """The settings of a source that decide its documents, before its tokenizer is known."""
    source = config.source
    template = ChatTemplate(source.template or PLAIN_TEMPLATE) if source.pairs else None
    reading = Reading(source.column, min_characters=source.min_characters, template=template)
    if isinstance(source, FilesSource):
        return dataclasses.replace(reading, errors=source.errors, separator=source.separator)
    return reading


def list_files(source: FilesSource, raw_dir: Path, progress: OnProgress | None = None) -> list[str]:
    """The local files that globs match, and those downloaded from addresses, each once, sorted.

    Raises `DataError` if a glob matches nothing or a file has an unknown extension.
    """
    # Not of `Path`, which takes longer to make than a small file to read.
    found = {path for each in source.paths if "://" not in each for path in _expand(each)}
    for path in sorted(found):
        check_format(path)
    addresses = [each for each in source.paths if "://" in each and not is_store(each)]
    if addresses:
        from infini_model.data.sources.http import fetch_files

        found.update(map(str, fetch_files(addresses, raw_dir, progress)))
    return sorted(found)


def list_objects(pattern: str) -> list[SourceFile]:
    """The objects that an address or a glob such as `s3://bucket/texts/**/*.parquet` matches.

    They are sorted by address, none is read. Raises `DataError` if nothing matches, an object has
    an unknown extension, the address is wrong or the store refuses; `UnreachableError` if it does
    not answer.
    """
    found = [
        SourceFile(
            address=each.address,
            bytes=each.bytes,
            fingerprint=_fingerprint(each),
            version=each.version.etag or "",
        )
        for each in matching(pattern)
    ]
    if not found:
        is_folder = not glob.has_magic(pattern) and bool(ObjectStore(pattern).list_below())
        raise _no_match(pattern, "object", is_folder)
    for file in found:
        check_format(file.address)
    return found


def _fingerprint(found: StoredObject) -> str:
    """Entity tag and size; the number of a version only without a tag, since listings omit it.

    S3 derives the tag from the content, or draws it at random: a copy has the same one, or is read
    as a new file. Elsewhere it tells writes apart, which two objects may have at the same moment,
    so the address belongs to it.
    """
    etag = found.version.etag
    if etag is None:
        return f"modified:{found.modified.isoformat()}-{found.bytes}-{found.address}"
    tag = f"etag:{etag.strip(chr(34))}-{found.bytes}"
    return tag if found.address.startswith("s3://") else f"{tag}-{found.address}"


def _no_match(pattern: str, what: str, is_folder: bool) -> DataError:
    hint = f"; it is a folder: write {pattern.rstrip('/')}/**/*.txt" if is_folder else ""
    return DataError(f"data.source.paths: {pattern!r} matches no {what}{hint}")


def _expand(pattern: str) -> list[str]:
    """The files that a glob matches. `{stdlib}` is the folder of Python's standard library."""
    # Unlike that of `Path`, it leaves the name of an unknown user as it is.
    expanded = Path(os.path.expanduser(pattern))  # noqa: PTH111
    if pattern.startswith(STDLIB):
        found = _in_stdlib(pattern.removeprefix(STDLIB).lstrip("/"))
    else:
        place = Path(glob.escape(str(Path.cwd())), expanded)
        found = glob.glob(str(place), recursive=True)  # noqa: PTH207
    files = [name for name in found if os.path.isfile(name)]  # noqa: PTH113
    if not files:
        raise _no_match(pattern, "file", expanded.is_dir())
    return files


def _in_stdlib(pattern: str) -> list[str]:
    """What `pattern` matches in the standard library, without installed packages.

    A leading `**/` is expanded per subfolder, since walking all installed packages would take
    longer than reading the library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    patterns = [pattern]
    if pattern.startswith("**/"):
        below = {path.name for path in root.iterdir() if path.is_dir()} - NOT_STDLIB
        patterns = [f"{glob.escape(name)}/{pattern}" for name in below]
        patterns.append(pattern.removeprefix("**/"))
    found = [
        name
        for each in patterns
        for name in glob.glob(each, root_dir=root, recursive=True)  # noqa: PTH207
    ]
    return [f"{root}/{name}" for name in found if not NOT_STDLIB & set(name.split("/"))]
