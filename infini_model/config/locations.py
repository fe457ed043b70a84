"""Where datasets and runs are kept: a local folder, and perhaps an object store behind it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from infini_model.config.section import takes

# The object stores: how their addresses begin, and the names of their settings and credentials in
# the environment.
STORES = {"s3://": "AWS_", "gs://": "GOOGLE_", "az://": "AZURE_"}


def is_url(value: Any) -> bool:
    """Whether a folder setting is an address such as `s3://bucket/team` instead of a path."""
    return isinstance(value, str) and "://" in value


def is_store(value: Any) -> bool:
    """Whether a path of a setting or of a source is an address in an object store."""
    return isinstance(value, str) and value.startswith(tuple(STORES))


def _is_local(value: Any) -> bool:
    """Return True for a path of this machine; `Path("s3://bucket")` is an address less a slash."""
    text = str(value) if isinstance(value, str | Path) else ""
    addresses = tuple(store.removesuffix("/") for store in STORES)
    return text != "" and not is_url(text) and not text.startswith(addresses)


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of `~`, which shells expand only in front of a word.

    Unlike `Path.expanduser`, it leaves the name of an unknown user as it is.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def _to_place(value: str | Path) -> Path | str:
    return str(value).rstrip("/") if is_url(value) else expanded(value)


_AN_ADDRESS = f"an address ({', '.join(STORES)})"
_FOLDER_OR_ADDRESS = takes(
    f"a folder, or {_AN_ADDRESS} as text",
    lambda value: is_store(value) or _is_local(value),
    BeforeValidator,
)
FilePath = Annotated[Path, AfterValidator(expanded)]
# A folder of this machine, or an address in an object store, which stays a string.
Place = Annotated[
    Path | str,
    _FOLDER_OR_ADDRESS,
    AfterValidator(_to_place),
    WithJsonSchema({"type": "string", "format": "path"}),
]
# A folder of this machine; an address is taken from it before (`RunConfig`).
SplitFolder = Annotated[FilePath, _FOLDER_OR_ADDRESS]
LocalFolder = Annotated[
    FilePath, takes("a local folder, not an address", _is_local, BeforeValidator)
]
StoreAddress = Annotated[str, takes(_AN_ADDRESS, is_store)]


def working_folder(address: str) -> Path:
    """The local folder of an address: the same for every process of this machine.

    It is in `INFINI_CACHE_DIR`, by default `~/.cache/infini-llama`.
    """
    base = expanded(os.environ.get("INFINI_CACHE_DIR", "~/.cache/infini-llama"))
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
