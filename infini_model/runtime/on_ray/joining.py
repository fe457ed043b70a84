"""Joining a Ray cluster that runs; whatever is in the way is one line. None is ever started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from typing import Literal

from infini_model.runtime.errors import ConfigError, UnreachableError, UserError

AUTO, ADDRESS_VARIABLE = "auto", "RAY_ADDRESS"
KNOCK_SECONDS = 10.0
# The setting by which a section of the configuration chooses Ray.
CHOICES = {"data": "data.engine", "launch": "launch.launcher"}


@contextlib.contextmanager
def joined(asked: str, section: Literal["data", "launch"]) -> Iterator[str]:
    """Be a driver of the cluster at `asked`, HOST:PORT or `auto`, while the block runs.

    Yields the address. What is still under way at the end is ended. `asked` is the `ray_address` of
    a section of the configuration, which messages name.

    Raises `UserError` if Ray is not installed, or the cluster has other versions of it or of
    Python; `UnreachableError` if there is no cluster.
    """
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ImportError as error:
        raise ConfigError(
            f"{CHOICES[section]}: ray is not installed: pip install -c requirements.lock -r "
            f"requirements-ray.txt ({error})"
        ) from error
    address = os.environ.get(ADDRESS_VARIABLE, AUTO) if asked == AUTO else asked
    where = f"{section}.ray_address: {address}"
    _knock(address, where)
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
        raise UserError(f"{where}: {_in_one_line(error)}") from error
    try:
        yield address
    finally:
        ray.shutdown()


def _knock(address: str, where: str) -> None:
    """Raise `UnreachableError` if nobody listens at an address: Ray itself takes minutes to."""
    host, _, port = address.rpartition(":")
    if address == AUTO:
        return
    if not re.fullmatch(r"[^/:]+", host) or not port.isdecimal():
        raise UserError(f"{ADDRESS_VARIABLE}: got {address!r}: takes auto or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise UnreachableError(
            f"{where}: no Ray cluster answers: {error.strerror or error}"
        ) from error


def _in_one_line(error: Exception) -> str:
    """What Ray says in several lines about two versions that differ, and about anything else."""
    text = str(error)
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(found) != 2:
        return " ".join(text.split())
    cluster, here = (f"Ray {ray} and Python {python}" for ray, python in found)
    return f"the cluster has {cluster}, this machine {here}"
