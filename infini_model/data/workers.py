"""Partitions made in parallel: in worker processes, or right here where the CPU makes only one.

A worker has a device of its own, and all take partitions from one queue: CPU workers and GPUs share
the work by how fast they are.

The workers are fresh interpreters that import this package and nothing of the caller's, and the
kernel ends them with their parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import infini_model
from infini_model.config import DataConfig
from infini_model.data.partitions import (
    PartitionRecord,
    PartitionTask,
    error_from,
    make_partition,
)
from infini_model.data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)


def make_partitions(
    tasks: Sequence[PartitionTask],
    tokenizer: Tokenizer,
    devices: Sequence[str],
    on_bytes: Callable[[int], None],
) -> dict[str, PartitionRecord]:
    """Make all the partitions, in no particular order; returns them by key.

    A worker for each of `devices`, but no more than partitions. The first error ends the work and
    is raised.
    """
    devices = devices[: len(tasks)]
    if list(devices) in ([], ["cpu"]):
        return {task.key: make_partition(task, tokenizer, on_bytes) for task in tasks}
    queue: SimpleQueue[PartitionTask] = SimpleQueue()
    for task in tasks:
        queue.put(task)
    team = _Team(queue, on_bytes)
    # The thread that starts a process must outlive it: the kernel takes its end for the parent's.
    with ThreadPoolExecutor(max_workers=len(devices)) as pool:
        try:
            for future in [pool.submit(team.drive, device) for device in devices]:
                future.result()
        finally:
            team.stop()
    return team.records


def worker_devices(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The device of each worker, GPUs first.

    `data.device: cuda` is all GPUs, `mixed` these and the cores that do not feed them. Where the
    tokenizer is none for GPUs the CPU takes their place, and a log line says why.
    """
    cpu = ["cpu"] * (config.workers or _cores())
    if config.device in ("auto", "cpu") or not _runs_on_gpus(tokenizer):
        return cpu
    if config.device.startswith("cuda:"):
        return [config.device]
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not gpus:
        logger.info("data.device mixed: there is no GPU, the CPU does it all")
    if config.device == "mixed":
        return [*gpus, *cpu[len(gpus) :]]
    return gpus


def _runs_on_gpus(tokenizer: Tokenizer) -> bool:
    from infini_model.data.device_tokenizer import UnsupportedTokenizerError, check_supported

    try:
        check_supported(tokenizer)
    except UnsupportedTokenizerError as error:
        logger.warning("%s: is tokenised on the CPU: %s", tokenizer.spec, error)
        return False
    return True


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

    def drive(self, device: str) -> None:
        """Start a worker on `device` and give it tasks until none are left."""
        with self._lock:
            if self._stopped:
                return
            process = _start(device)
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


def _start(device: str) -> subprocess.Popen[str]:
    root = str(Path(infini_model.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread for each core: there are as many workers as cores, unless they are GPUs.
    threads = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_NUM_THREADS")
    one = dict.fromkeys(threads, "1") if device == "cpu" else {}
    return subprocess.Popen(
        [sys.executable, "-m", "infini_model.data.partitions", str(os.getpid()), device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **one, "PYTHONPATH": path},
    )
