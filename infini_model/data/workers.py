"""Partitions made in parallel: in worker processes, or right here where there is only one.

The workers are fresh interpreters that import this package and nothing of the caller's, and the
kernel ends them with their parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import infini_model
from infini_model.data.partitions import (
    PartitionRecord,
    PartitionTask,
    error_from,
    make_partition,
)
from infini_model.data.tokenizers import Tokenizer


def make_partitions(
    tasks: Sequence[PartitionTask],
    tokenizer: Tokenizer,
    workers: int,
    on_bytes: Callable[[int], None],
) -> dict[str, PartitionRecord]:
    """Make all the partitions, in no particular order; returns them by key.

    `workers` processes at most, 0 for one a core. The first error ends the work and is raised.
    """
    count = min(workers or _cores(), len(tasks))
    if count <= 1:
        return {task.key: make_partition(task, tokenizer, on_bytes) for task in tasks}
    queue: SimpleQueue[PartitionTask] = SimpleQueue()
    for task in tasks:
        queue.put(task)
    team = _Team(queue, on_bytes)
    # The thread that starts a process must outlive it: the kernel takes its end for the parent's.
    with ThreadPoolExecutor(max_workers=count) as pool:
        try:
            for future in [pool.submit(team.drive) for _ in range(count)]:
                future.result()
        finally:
            team.stop()
    return team.records


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Team:
    """Worker processes that take tasks from one queue."""

    def __init__(self, queue: SimpleQueue[PartitionTask], on_bytes: Callable[[int], None]) -> None:
        self.records: dict[str, PartitionRecord] = {}
        self._queue = queue
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._stopped = False

    def stop(self) -> None:
        """End the workers, whatever they are doing: what is unfinished leaves no trace."""
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.kill()

    def drive(self) -> None:
        """Start a worker and give it tasks until none are left."""
        with self._lock:
            if self._stopped:
                return
            process = _start()
            self._processes.append(process)
        try:
            while not self._stopped:
                try:
                    task = self._queue.get_nowait()
                except Empty:
                    return
                self._hand(process, task)
        except BaseException:
            self.stop()
            raise
        finally:
            process.kill()
            process.communicate()

    def _hand(self, process: subprocess.Popen[str], task: PartitionTask) -> None:
        assert process.stdin is not None  # noqa: S101 -- told so to the type checker
        assert process.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # it has ended; its silence says so below
            process.stdin.write(task.model_dump_json() + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            if "record" in answer:
                self.records[task.key] = PartitionRecord.model_validate(answer["record"])
                return
            if "error" in answer:
                raise error_from(answer)
            with self._lock:
                self._on_bytes(answer["bytes"])
        if not self._stopped:
            raise ChildProcessError(
                f"a data worker ended with status {process.wait()}; where memory is short, "
                "take fewer data.workers or smaller data.partition_megabytes"
            )


def _start() -> subprocess.Popen[str]:
    root = str(Path(infini_model.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread each: there are as many workers as cores.
    one = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "infini_model.data.partitions", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **one, "PYTHONPATH": path},
    )
