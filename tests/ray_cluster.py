"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from commands import eventually
from ray.cluster_utils import Cluster

# Smaller than Ray's own defaults: a node or a head that dies is noticed in seconds.
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "gcs_rpc_server_reconnect_timeout_s": 3,
}
OBJECTS = 80_000_000
TASK = "ray::make_partition"


class RayCluster:
    """A head without CPUs, which drivers join, and nodes that work; one CPU each."""

    def __init__(self, nodes: int, environment: dict[str, str]) -> None:
        self._environment = environment
        # A socket's path has at most 107 characters.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        Path("/tmp/ray").mkdir(exist_ok=True)
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "temp_dir": self._folder,
            "object_store_memory": OBJECTS,
            "_system_config": SYSTEM,
        }
        with mock.patch.dict(os.environ, environment, clear=True):
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> None:
        with mock.patch.dict(os.environ, self._environment, clear=True):
            made = self._cluster.add_node(num_cpus=1, object_store_memory=OBJECTS)
        self._nodes.append(made)

    def workers(self, task: str = TASK) -> list[psutil.Process]:
        """The processes that run a task now."""
        return [process for node in self._nodes for process in _workers(node, task)]

    def kill_worker(self) -> None:
        """Kill a process of the first node in the middle of a task."""
        _in_a_task(self._nodes[0]).kill()

    def kill_node(self) -> None:
        """Kill the raylet of the last node in the middle of a task, and with it the node."""
        node = self._nodes.pop()
        worker = _in_a_task(node)
        _raylet(node).kill()
        worker.kill()

    def lose_node_of(self, task: str) -> None:
        """Kill the raylet of a node that runs `task`, and with it the node."""
        node = next(node for node in reversed(self._nodes) if _workers(node, task))
        self._nodes.remove(node)
        _raylet(node).kill()

    def kill_head(self) -> None:
        """Kill the process without which there is no cluster, in the middle of a task."""
        _in_a_task(self._nodes[0])
        psutil.Process(_pid(self._cluster.head_node, "gcs_server")).kill()

    def end(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(_pid(node, "raylet"))


def _pid(node: Any, kind: str) -> int:
    return int(node.all_processes[kind][0].process.pid)


def _workers(node: Any, task: str = TASK) -> list[psutil.Process]:
    return [each for each in _raylet(node).children(recursive=True) if task in _name(each)]


def _in_a_task(node: Any) -> psutil.Process:
    """A process of a node that is stopped in the middle of a task."""
    found: list[psutil.Process] = []

    def is_stopped() -> bool:
        for process in _workers(node):
            process.suspend()
            if TASK in _name(process):
                found.append(process)
                return True
            process.resume()
        return False

    eventually(is_stopped, "a task", seconds=60)
    return found[0]


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
