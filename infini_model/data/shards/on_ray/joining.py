"""Joining a Ray cluster that runs; whatever is in the way is one line. None is ever started."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from infini_model.config import DataConfig
from infini_model.runtime.errors import ConfigError, DeviceError, UnreachableError, UserError

AUTO, ADDRESS_VARIABLE = "auto", "RAY_ADDRESS"
KNOCK_SECONDS = 10.0
# The settings that reserve something for a task, by Ray's name of it.
KEYS = {"CPU": "data.ray_cpus", "GPU": "data.ray_gpus", "memory": "data.ray_memory_gigabytes"}


@contextlib.contextmanager
def joined(asked: str) -> Iterator[str]:
    """Be a driver of the cluster at `asked`, HOST:PORT or `auto`, while the block runs.

    Yields the address. What is still under way at the end is ended.

    Raises `UserError` if Ray is not installed, or the cluster has other versions of it or of
    Python; `UnreachableError` if there is no cluster.
    """
    try:
        import ray
        from ray.exceptions import AuthenticationError
    except ImportError as error:
        raise ConfigError(
            "data.engine: ray is not installed: pip install -c requirements.lock -r "
            f"requirements-ray.txt ({error})"
        ) from error
    address = os.environ.get(ADDRESS_VARIABLE, AUTO) if asked == AUTO else asked
    _knock(address)
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UnreachableError(
            f"data.ray_address: {address}: there is no Ray cluster that lets this machine join; "
            "one with a token needs RAY_AUTH_MODE=token and the same token here"
        ) from error
    except AuthenticationError as error:
        message = "the Ray cluster refuses this token; see RAY_AUTH_MODE"
        raise UserError(f"data.ray_address: {address}: {message}") from error
    except RuntimeError as error:
        raise UserError(f"data.ray_address: {address}: {_in_one_line(error)}") from error
    try:
        yield address
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
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
            f"data.ray_address: {address}: no Ray cluster answers: {error.strerror or error}"
        ) from error


def _in_one_line(error: Exception) -> str:
    """What Ray says in several lines about two versions that differ, and about anything else."""
    text = str(error)
    found = re.findall(r"Ray: (\S+)\s+Python: (\S+)", text)
    if len(found) != 2:
        return " ".join(text.split())
    cluster, here = (f"Ray {ray} and Python {python}" for ray, python in found)
    return f"the cluster has {cluster}, this machine {here}"


def reserved(config: DataConfig) -> dict[str, float]:
    """What a task reserves on its node, by Ray's names."""
    needs = {"CPU": config.ray_cpus}
    if config.device == "cuda":
        needs["GPU"] = config.ray_gpus
    if config.ray_memory_gigabytes is not None:
        needs["memory"] = config.ray_memory_gigabytes * 1e9
    return needs


def check_room(needs: Mapping[str, float], nodes: list[dict[str, Any]], address: str) -> None:
    """Raise a `UserError` that names the setting if no node ever has room for a task."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for name, need in needs.items():
        most = max((node.get(name, 0.0) for node in alive), default=0.0)
        if name == "GPU" and not most:
            raise DeviceError(f"data.device: got 'cuda': no node of {address} has a GPU")
        if most < need:
            unit = 1e9 if name == "memory" else 1.0
            raise UserError(
                f"{KEYS[name]}: got {need / unit:g}: no node of {address} has more than "
                f"{most / unit:g}"
            )
    if not any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in alive):
        wanted = ", ".join(KEYS[name] for name in needs)
        raise UserError(f"{wanted}: no node of {address} has them all")
