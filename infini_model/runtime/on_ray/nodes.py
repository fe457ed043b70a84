"""What the nodes of a Ray cluster have in common with the machine that starts the work.

They import the same package, and see the same folder unless everything is in an object store.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import infini_model
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError

# Kinds of failure, as in `infini_model.runtime.stage_protocol`; the message follows.
Failure = tuple[str, str]


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

    It travels by value, since a node may lack the package, and returns what `attempt` does.
    """

    def call(*arguments: Any) -> Any:
        import importlib
        import socket

        try:
            function = getattr(importlib.import_module(module), name)
            from infini_model.runtime.on_ray.nodes import attempt
        except ImportError as error:
            host = socket.gethostname()
            return "user", f"infini_model: cannot be imported on {host}: {error}"
        return attempt(function, *arguments)

    # Ray shows the name of the task, as that of the process too.
    call.__name__ = call.__qualname__ = name
    return call


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns, or what a user can mend as a `Failure` that names this node."""
    try:
        return function(*arguments)
    except UserError as error:
        return "user", f"{error} (on {socket.gethostname()})"
    except ConnectionError as error:
        return "network", f"{error} (on {socket.gethostname()})"
