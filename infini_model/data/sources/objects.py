"""The objects of a store as source files: listed without reading one."""

from __future__ import annotations

import glob

from infini_model.data.sources.files import SourceFile
from infini_model.runtime.errors import DataError
from infini_model.runtime.object_stores.globs import matching
from infini_model.runtime.object_stores.object_store import ObjectStore, StoredObject


def list_objects(pattern: str) -> list[SourceFile]:
    """The objects that an address or a glob such as `s3://bucket/texts/**/*.parquet` matches.

    They are sorted by address. Their fingerprints are what the store says of them.

    Raises `DataError` if nothing matches, the address is wrong or the store refuses;
    `UnreachableError` if it does not answer.
    """
    found = matching(pattern)
    if not found:
        hint = (
            f"; it is a folder: write {pattern.rstrip('/')}/**/*.txt" if _is_folder(pattern) else ""
        )
        raise DataError(f"data.source.paths: {pattern!r} matches no object{hint}")
    return [_source_file(each) for each in found]


def _is_folder(address: str) -> bool:
    return not glob.has_magic(address) and bool(ObjectStore(address).list_below())


def _source_file(found: StoredObject) -> SourceFile:
    return SourceFile(
        address=found.address,
        bytes=found.bytes,
        fingerprint=_fingerprint(found),
        version=found.version.etag or "",
    )


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
