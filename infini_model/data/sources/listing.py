"""The download stage: list the files of a source by what identifies their content."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import glob
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from infini_model.config import DataConfig, FilesSource, HubSource
from infini_model.config.data import Source
from infini_model.config.locations import is_store
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.conversations import Conversations
from infini_model.data.sources.files import (
    FileRange,
    Listing,
    SourceFile,
    fingerprint,
    local_files,
)
from infini_model.data.sources.formats import check_format, whole_file
from infini_model.data.sources.rows import Reading
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.object_store import ObjectStore, StoredObject, matching
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

STDLIB = "{stdlib}"
# Folders below the standard library that are not part of it.
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


def list_sources(
    config: DataConfig,
    output_dir: Path,
    *,
    datasets_dir: Path | None = None,
    progress: OnProgress | None = None,
) -> Listing:
    """List the files of the sources with their fingerprints; download those that need it.

    Files at http addresses are downloaded to `<output_dir>/raw/`, once, resuming earlier attempts.
    All others, also those on the hub and in object stores, are read later. A local file is only
    read for its checksum, and only if no machine has done so since it was written.
    `progress(done, total)` counts the bytes of the downloads.

    Raises `DataError` in one line that names the file or the address, `StoreError` if a store
    refuses; `UnreachableError` if a retry may help; `UserError` on a full disk.
    """
    facts = fact_cache(datasets_dir or output_dir / "datasets")
    listed: dict[str, list[FileRange]] = {}
    raw_dir = output_dir / "raw"
    for name, source in config.named_sources.items():
        with named_settings(name):
            listed[name] = _list_source(source, raw_dir, progress)
    parts = [part for ranges in listed.values() for part in ranges]
    files = iter(fingerprint([part.file for part in parts], facts))
    facts.save()
    for ranges in listed.values():
        ranges[:] = [part.model_copy(update={"file": next(files)}) for part in ranges]
    return Listing(sources=listed)


@contextlib.contextmanager
def named_settings(source: str) -> Iterator[None]:
    """Name the settings of a source by its own name in the errors of the block."""
    try:
        yield
    except DataError as error:
        if not source:
            raise
        raise type(error)(str(error).replace("data.source.", f"data.sources.{source}.")) from error


def _list_source(source: Source, raw_dir: Path, progress: OnProgress | None) -> list[FileRange]:
    if isinstance(source, HubSource):
        from infini_model.data.sources.hub import list_dataset

        return list_dataset(source)
    paths = list_files(source, raw_dir, progress)
    stored = {
        file.address: file
        for pattern in filter(is_store, source.paths)
        for file in list_objects(pattern, source.format)
    }
    files = [*(stored[address] for address in sorted(stored)), *local_files(paths)]
    return [whole_file(file, source.format) for file in files]


def raw_files_lock(output_dir: Path) -> Path:
    """The lock of files in `<output_dir>/raw/`: held exclusively by whoever removes some.

    Whoever needs files that no listing names yet shares it.
    """
    return output_dir / "raw" / ".lock"


def reading_of(source: Source) -> Reading:
    """The settings of a source that decide its documents, before its tokenizer is known."""
    if source.screen is not None:
        return Reading()  # of the files that screening leaves
    template = ChatTemplate(source.template or PLAIN_TEMPLATE)
    chats = Conversations(template, source.learn, tuple(source.columns)) if source.pairs else None
    reading = Reading(source.column, min_characters=source.min_characters, conversations=chats)
    if isinstance(source, FilesSource):
        return dataclasses.replace(reading, errors=source.errors, separator=source.separator)
    return reading


def list_files(source: FilesSource, raw_dir: Path, progress: OnProgress | None = None) -> list[str]:
    """The local files that globs match, and those downloaded from addresses, each once, sorted.

    Raises `DataError` if a glob matches nothing, or a file has an unsupported format or a name that
    no listing can hold, unless `errors` says to skip it.
    """
    # Not of `Path`, which takes longer to make than a small file to read.
    found = {path for each in source.paths if "://" not in each for path in _expand(each)}
    for path in sorted(found):
        check_format(path, source.format)
        # Bytes that are not UTF-8 are lone surrogates, which no listing can hold.
        shown = path if path.isprintable() else os.fsencode(path).decode(errors="backslashreplace")
        if shown != path and (source.errors != "skip" or len(found) == 1):
            raise DataError(f"{shown}: the name is not UTF-8; rename it")
        if shown != path:
            log.warning("%s: left out, as the name is not UTF-8", shown)
            found.remove(path)
    addresses = [each for each in source.paths if "://" in each and not is_store(each)]
    if addresses:
        from infini_model.data.sources.http import fetch_files

        found.update(map(str, fetch_files(addresses, raw_dir, source.format, progress)))
    return sorted(found)


def list_objects(pattern: str, given: str | None = None) -> list[SourceFile]:
    """The objects that an address or a glob such as `s3://bucket/texts/**/*.parquet` matches.

    They are sorted by address, none is read. `given` is their format; by default suffixes tell it.

    Raises `DataError` if nothing matches or an object has an unsupported format, `StoreError` if
    the address is wrong or the store refuses, `UnreachableError` if it does not answer.
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
        is_folder = bool(ObjectStore(pattern).list_below())
        raise _no_match(pattern, "object", is_folder)
    for file in found:
        check_format(file.address, given)
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
    inside = f"{glob.escape(pattern.rstrip('/'))}/**/*.txt"
    hint = f"; it is a folder: write {inside}" if is_folder else ""
    return DataError(f"data.source.paths: {pattern!r} matches no {what}{hint}")


def _expand(pattern: str) -> list[str]:
    """The files that a glob matches. `{stdlib}` is the folder of Python's standard library.

    Folders that it begins with, or all of it, are taken literally if they exist.
    """
    excluded = NOT_STDLIB if pattern.startswith(STDLIB) else frozenset[str]()
    expanded = pattern.replace(STDLIB, sysconfig.get_path("stdlib"), 1) if excluded else pattern
    # Unlike that of `Path`, it leaves the name of an unknown user as it is.
    place = Path.cwd() / os.path.expanduser(expanded)  # noqa: PTH111
    literal = next(each for each in (place, *place.parents) if os.path.exists(each))  # noqa: PTH110
    parts = place.parts[len(literal.parts) :]
    found = _walk(str(literal), parts, excluded, set()) if parts else [str(place)]
    files = [name for name in found if os.path.isfile(name)]  # noqa: PTH113
    if not files:
        raise _no_match(pattern, "file", place.is_dir())
    return files


def _walk(
    folder: str,
    parts: tuple[str, ...],
    excluded: frozenset[str],
    seen: set[tuple[str, tuple[str, ...]]],
) -> Iterator[str]:
    """Yield the matches of a glob in a folder, which is read once, whatever links lead to it.

    `seen` has the real names of the folders that were read, each with the parts of the glob.
    """
    if (place := (os.path.realpath(folder), parts)) in seen:
        return
    seen.add(place)
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _walk(folder, rest or ("*",), excluded, seen)
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError):  # as `glob` does
        entries = sorted(os.scandir(folder), key=os.DirEntry.is_symlink)
    for entry in entries:
        hidden = entry.name.startswith(".") and not part.startswith(".")
        if hidden or entry.name in excluded or not fnmatch.fnmatchcase(entry.name, part):
            continue
        deeper = parts if part == "**" else rest
        if not deeper:
            yield entry.path
        elif os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():  # noqa: PTH112
            yield from _walk(entry.path, deeper, excluded, seen)
