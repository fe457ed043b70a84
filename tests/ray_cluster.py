"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from commands import PATIENCE, eventually, kill, words_of
from ray._private.services import get_node
from ray.cluster_utils import Cluster

# A node or a head that dies refuses connections, and is noticed in seconds; one that lives may be
# slow to answer.
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 100_000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 3,
    # Otherwise workers are killed when other programs take the memory of this machine.
    "memory_monitor_refresh_ms": 0,
}
OBJECTS = 80_000_000
TASK = "ray::make_partition"
# Python reads it at the start of every worker, which then waits in the middle of a partition while
# the file `held` exists; not of its first two, so that some are finished.
_SITE = """
import os, pathlib, sys, time
held = pathlib.Path({folder!r}, "held")
begun = 0
def hold(event, arguments):
    global begun
    if event == "os.mkdir" and "/.partitions/.tmp-" in str(arguments[0]):
        begun += 1
        if begun > 2 and held.exists():
            held.with_name(f"held-{{os.getpid()}}").touch()
            while held.exists():
                time.sleep(0.05)
sys.addaudithook(hold)
"""


class RayCluster:
    """A head without CPUs, which drivers join, and nodes that work; one CPU each."""

    def __init__(self, nodes: int, environment: dict[str, str]) -> None:
        # A socket's path has at most 107 characters.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._site = Path(self._folder, "site")
        self._site.mkdir()
        site = _SITE.format(folder=str(self._site))
        (self._site / "sitecustomize.py").write_text(site, encoding="utf-8")
        paths = f"{environment['PYTHONPATH']}:{self._site}"
        self._environment = {**environment, "PYTHONPATH": paths}
        Path("/tmp/ray").mkdir(exist_ok=True)
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "temp_dir": self._folder,
            "object_store_memory": OBJECTS,
            "_system_config": SYSTEM,
        }
        self._cluster = Cluster()
        self._start(**head)
        self.address = str(self._cluster.address)
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> None:
        self._nodes.append(self._start(num_cpus=1, object_store_memory=OBJECTS))

    def _start(self, **arguments: Any) -> Any:
        environment = {**self._environment, "RAY_gcs_server_port_wait_time_s": f"{PATIENCE:.0f}"}
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            # Ray itself asks for 30 s, which cannot be set.
            mock.patch("ray._private.services.get_node", _patiently),
        ):
            node = self._cluster.add_node(wait=False, **arguments)
        self._cluster._wait_for_node(node, PATIENCE)
        return node

    @contextmanager
    def held(self) -> Iterator[None]:
        """In this block every worker stays in the middle of a partition, after its first two."""
        held = self._site / "held"
        held.touch()
        try:
            yield
        finally:
            for path in self._site.glob("held*"):
                path.unlink()

    def wait_until_held(self) -> list[psutil.Process]:
        """Wait until a worker of every node is held; returns them."""
        return [self._held(node) for node in self._nodes]

    def _held(self, node: Any) -> psutil.Process:
        """Wait until a worker of a node is held, and return it."""
        found: list[psutil.Process] = []

        def is_held() -> bool:
            workers = _workers(node)
            found[:] = [each for each in workers if (self._site / f"held-{each.pid}").exists()]
            return found != []

        eventually(is_held, "a worker in a partition")
        return found[0]

    def workers(self, task: str = TASK) -> list[psutil.Process]:
        """The processes that run a task now."""
        return [process for node in self._nodes for process in _workers(node, task)]

    def kill_worker(self) -> None:
        """Kill the worker of the first node that is held in the middle of a partition."""
        self._held(self._nodes[0]).kill()

    def kill_node(self) -> None:
        """Kill the raylet of the last node, whose worker is held, and with it the node."""
        node = self._nodes.pop()
        worker = self._held(node)
        _kill_raylet(node)
        kill(worker, signal.SIGKILL)

    def lose_node_of(self, task: str) -> None:
        """Kill the raylet of a node that runs `task`, and with it the node."""
        node = next(node for node in reversed(self._nodes) if _workers(node, task))
        self._nodes.remove(node)
        _kill_raylet(node)

    def kill_head(self) -> None:
        """Kill the process without which there is no cluster; the raylets then end."""
        psutil.Process(_pid(self._cluster.head_node, "gcs_server")).kill()
        for node in (*self._nodes, self._cluster.head_node):
            _reap(node)

    def end(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _patiently(*arguments: Any) -> Any:
    """What `get_node` returns, once the node is known to the head."""
    found = []

    def is_known() -> bool:
        with suppress(RuntimeError):
            found.append(get_node(*arguments))
        return found != []

    eventually(is_known, "a node of Ray")
    return found[0]


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(_pid(node, "raylet"))


def _kill_raylet(node: Any) -> None:
    _raylet(node).kill()
    _reap(node)


def _reap(node: Any) -> None:
    """The workers of a raylet live on for as long as it is a zombie, with the locks they hold."""
    node.all_processes["raylet"][0].process.wait(PATIENCE)


def _pid(node: Any, kind: str) -> int:
    return int(node.all_processes[kind][0].process.pid)


def _workers(node: Any, task: str = TASK) -> list[psutil.Process]:
    started = _raylet(node).children(recursive=True)
    return [each for each in started if task in " ".join(words_of(each))]
