"""Where datasets and runs are kept: a local folder, and perhaps an object store behind it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainValidator, WithJsonSchema

STORES = ("s3://", "gs://", "az://")


def is_url(value: Any) -> bool:
    """Whether a folder setting is an address such as `s3://bucket/team` instead of a path."""
    return isinstance(value, str) and "://" in value


def _is_store(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(STORES)


def _check_scheme(value: Any) -> Any:
    if not isinstance(value, str | Path) or (is_url(value) and not _is_store(value)):
        raise ValueError(f"takes a folder, or an address ({', '.join(STORES)})")
    return value


def _check_store(value: str) -> str:
    if not _is_store(value):
        raise ValueError(f"takes an address ({', '.join(STORES)})")
    return value


def _to_place(value: Any) -> Path | str:
    checked: Path | str = _check_scheme(value)
    return str(checked).rstrip("/") if is_url(checked) else Path(checked)


# A folder of this machine, or an address in an object store, which stays a string.
Place = Annotated[
    Path | str,
    PlainValidator(_to_place),
    WithJsonSchema({"type": "string", "format": "path"}),
]

# A folder of this machine; an address is taken from it before (`split_addresses`).
SplitFolder = Annotated[Path, BeforeValidator(_check_scheme)]
StoreAddress = Annotated[str, AfterValidator(_check_store)]


def _refuse_address(value: Any) -> Any:
    if is_url(value):
        raise ValueError("takes a local folder, not an address")
    return value


LocalFolder = Annotated[Path, BeforeValidator(_refuse_address)]


def _check_cluster(value: str) -> str:
    if re.fullmatch(r"auto|[^\s/:]+:\d+", value):
        return value
    raise ValueError("takes auto or HOST:PORT; this machine must be a node of the cluster")


# A Ray cluster to join.
RayAddress = Annotated[str, AfterValidator(_check_cluster)]


def working_folder(address: str) -> Path:
    """The local folder of an address: the same for every process of this machine.

    It is in `INFINI_CACHE_DIR`, by default `~/.cache/infini-llama`.
    """
    base = Path(os.environ.get("INFINI_CACHE_DIR", "~/.cache/infini-llama")).expanduser()
    return base / hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]


def shareable_location(output_dir: Path, store: str | None) -> str:
    """The `INFINI_OUTPUT_DIR` by which another process has this output folder and this store."""
    if store is not None and output_dir == working_folder(store):
        return store
    return str(output_dir.resolve())


def local_folder(folder: Path | None, address: str | None) -> Path | None:
    """A recorded folder as it is on this machine, which has a working folder of its own.

    A folder that somebody chose is not the working folder of the address, and stays.
    """
    here = None if address is None else working_folder(address)
    return here if folder and here and folder.name == here.name else folder


def split_addresses(values: Any) -> Any:
    """Divide folders that are addresses into the store and its local working folder.

    `output_dir` is by default that of the environment, `INFINI_OUTPUT_DIR`.
    """
    if not isinstance(values, Mapping):
        return values
    values = dict(values)
    if "INFINI_OUTPUT_DIR" in os.environ:
        values.setdefault("output_dir", os.environ["INFINI_OUTPUT_DIR"])
    for folder, store in (("output_dir", "store"), ("data_dir", "data_store")):
        address = values.get(folder)
        if _is_store(address):
            values |= {folder: working_folder(address), store: address.rstrip("/")}
    return values
