"""What runs on a node of the cluster: the launcher of this node's ranks, in a Ray actor."""

from __future__ import annotations

import os
import queue
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infini_model.config import load_config
from infini_model.runtime.ray import check_mark, check_sources
from infini_model.training.launch.failures import Preempted, Report
from infini_model.training.launch.launcher import train_here

# How long `poll` waits for something to tell.
WAIT_SECONDS = 0.2
LINE, PROGRESS, END = "line", "progress", "end"


@dataclass(frozen=True)
class Place:
    """A node of a gang: its name, its address, and a port that is free there."""

    host: str
    address: str
    port: int


def survey(sources: str, mark: str) -> Place:
    """This node, once it is known to run the same code and to see the run folder.

    `sources` is the fingerprint of this package, `mark` a file in the run folder. Raises as
    `check_sources` and `check_mark` do.
    """
    from ray.util import get_node_ip_address

    check_sources(sources)
    check_mark(Path(mark), "run.output_dir must be a folder that all nodes share")
    with socket.create_server(("", 0)) as free:
        return Place(socket.gethostname(), get_node_ip_address(), free.getsockname()[1])


@dataclass(frozen=True)
class Assignment:
    """What a node trains: its settings, the dataset and the run; `threads` is OMP_NUM_THREADS."""

    config: dict[str, Any]
    dataset_dir: str
    run_dir: str
    threads: str | None


class Launcher:
    """The launcher of one node. A thread works; the methods, Ray's calls, return at once."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        # Ray's number of threads is meant for its own workers; a node's launcher has ranks.
        os.environ.pop("OMP_NUM_THREADS", None)
        if assignment.threads is not None:
            os.environ["OMP_NUM_THREADS"] = assignment.threads
        threading.Thread(target=self._work, name="launcher", daemon=True).start()

    def _work(self) -> None:
        try:
            self._train()
        except Exception as error:  # noqa: BLE001 - the driver raises it
            self._messages.put((END, asdict(Report.of(error))))
        else:
            self._messages.put((END, None))

    def _train(self) -> None:
        train_here(
            load_config(overrides=[self._assignment.config]),
            Path(self._assignment.dataset_dir),
            Path(self._assignment.run_dir),
            timeout_seconds=None,
            on_line=lambda line: self._messages.put((LINE, line)),
            on_progress=lambda done, total: self._messages.put((PROGRESS, (done, total))),
            stop=self._reason,
        )

    def _reason(self) -> Exception | None:
        return Preempted("stopped") if self._stopped.is_set() else None

    def poll(self) -> list[tuple[str, Any]]:
        """What has happened since the last call: lines, progress, and at last the end.

        The end is None, or the fields of a `Report`.
        """
        try:
            messages = [self._messages.get(timeout=WAIT_SECONDS)]
        except queue.Empty:
            return []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def stop(self) -> None:
        """Have the ranks save a checkpoint and end."""
        self._stopped.set()
