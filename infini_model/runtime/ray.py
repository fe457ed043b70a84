"""Ray clusters: joining one that runs, and what its nodes have in common with this machine.

Whatever is in the way is one line; no cluster is ever started. Nodes import the same package, and
see the same folder unless everything is in an object store.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import infini_model
from infini_model.runtime import storage
from infini_model.runtime.errors import (
    ConfigError,
    DataError,
    UnreachableError,
    UserError,
    describe_error,
)

# Kinds of failure, as in `infini_model.runtime.stage_protocol`; the message follows.
Failure = tuple[str, str]
AUTO, ADDRESS_VARIABLE = "auto", "RAY_ADDRESS"
CONNECT_SECONDS = 10.0


@contextlib.contextmanager
def connect(setting: str) -> Iterator[str]:
    """Be a driver of the cluster that this machine is a node of, while the block runs.

    Of several `RAY_ADDRESS` names one, HOST:PORT of its head. Yields the address. What is still
    under way at the end is ended. `setting` is the one that chooses Ray, which messages name.

    Raises `UserError` if Ray is not installed, or the cluster has other versions of it or of
    Python; `UnreachableError` if there is no cluster.
    """
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ImportError as error:
        raise ConfigError(
            f"{setting}: ray is not installed: pip install 'infini-model[ray]' ({error})"
        ) from error
    address = os.environ.get(ADDRESS_VARIABLE, AUTO)
    where = f"{setting}: {ADDRESS_VARIABLE}={address}"
    _check_reachable(address, where)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UnreachableError(
            f"{where}: there is no Ray cluster that lets this machine join; "
            "one with a token needs RAY_AUTH_MODE=token and the same token here"
        ) from error
    except AuthenticationError as error:
        message = "the Ray cluster refuses this token; see RAY_AUTH_MODE"
        raise UserError(f"{where}: {message}") from error
    except RuntimeError as error:
        raise UserError(f"{where}: {describe_error(error)}") from error
    try:
        yield address
    finally:
        ray.shutdown()


def _check_reachable(address: str, where: str) -> None:
    """Raise `UnreachableError` if nobody listens at an address: Ray itself takes minutes to."""
    host, _, port = address.rpartition(":")
    if address == AUTO:
        return
    if not re.fullmatch(r"[^/:]+", host) or not port.isdecimal():
        raise UserError(f"{ADDRESS_VARIABLE}: got {address!r}: takes auto or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UnreachableError(
            f"{where}: no Ray cluster answers: {error.strerror or error}"
        ) from error


@functools.cache
def sources_fingerprint() -> str:
    """A hash of the source files of this package: machines with equal ones run the same code."""
    root = Path(infini_model.__file__).parent
    return storage.content_key(
        {str(path.relative_to(root)): storage.sha256(path) for path in root.rglob("*.py")}
    )


def check_sources(expected: str) -> None:
    """Raise `UserError` if this node has another version of this package than the one expected."""
    if sources_fingerprint() != expected:
        raise UserError(
            f"{Path(infini_model.__file__).parent}: is not the infini_model that started the job; "
            "install the same one on every node"
        )


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Create a folder, and mark it with a file while the block runs; yields the file.

    Raises `UserError` if the folder cannot be written.
    """
    whole = storage.make_folder(folder).resolve()
    with (
        storage.named_os_errors(whole),
        tempfile.NamedTemporaryFile(prefix=f"{storage.TEMPORARY}ray-", dir=whole) as file,
    ):
        yield Path(file.name)


def check_mark(mark: Path, remedy: str) -> None:
    """Raise `DataError`, with a remedy, unless this node sees the folder that `marked` marked."""
    if not mark.exists():
        raise DataError(
            f"{mark.parent}: is not the folder of this name on the machine that started the job; "
            f"{remedy}"
        )


def on_node(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module of this package, as the function of a Ray task.

    It travels by value, since a node may lack the package. Instead of raising what a user can mend
    it returns a `Failure` that names the node.
    """

    def call(*arguments: Any) -> Any:
        import importlib
        import socket

        host = socket.gethostname()
        try:
            from infini_model.runtime.errors import UserError

            function = getattr(importlib.import_module(module), name)
        except ImportError as error:
            return "user", f"infini_model: cannot be imported on {host}: {error}"
        try:
            return function(*arguments)
        except UserError as error:
            return "user", f"{error} (on {host})"
        except ConnectionError as error:
            return "network", f"{error} (on {host})"

    # Ray shows the name of the task, as that of the process too.
    call.__name__ = call.__qualname__ = name
    return call
