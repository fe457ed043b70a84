"""Records: frozen models that go to a JSON file and back without loss.

The result of a stage can be such a file, which a later process reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError

from infini_model.config.explaining import key_of
from infini_model.config.reading import warn_of_unknown
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError


class Record(BaseModel):
    """Immutable, and without unknown fields, except where it is read from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


RecordType = TypeVar("RecordType", bound=Record)


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises `DataError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_record(path: Path, kind: type[RecordType]) -> RecordType:
    """Read a JSON file as `kind`. Raises `DataError` that names a missing or damaged file."""
    return parse_record(read_bytes(path), str(path), kind)


def parse_record(content: bytes, place: str, kind: type[RecordType]) -> RecordType:
    """Read JSON as `kind`, without unknown fields, of which a warning is logged.

    Raises `DataError` that names its `place` if it is damaged.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        if all(each["type"] == "extra_forbidden" for each in errors):
            warn_of_unknown(place, ", ".join(key_of(each["loc"]) for each in errors))
            return kind.model_validate_json(content, extra="ignore")
        first = errors[0]
        where = ".".join(str(part) for part in first["loc"])
        parts = [place, "is damaged", *filter(None, [where]), first["msg"]]
        raise DataError(": ".join(parts).replace("\n", " ")) from error


def write_record(path: Path, record: Record) -> None:
    """Write a record as indented JSON, complete or not at all.

    Raises `DataError` for a name that is not UTF-8, which JSON cannot hold.
    """
    try:
        # Not by `json`, whose encoder is several times as slow where it indents.
        text = record.model_dump_json(indent=2)
    except PydanticSerializationError as error:
        raise DataError(f"{path}: cannot be written: {error}") from error
    with storage.atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
