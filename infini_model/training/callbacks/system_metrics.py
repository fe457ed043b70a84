"""System metrics of rank 0's machine, sampled during training.

A separate thread samples them, so a slow driver never delays a step. The names are those of
MLflow's system metrics, so its UI shows them as such; `process` is rank 0 only.
"""

from __future__ import annotations

import threading

from infini_model.runtime.errors import DeviceError
from infini_model.training.callbacks.callback import Callback, Status, Step
from infini_model.training.launch.devices import list_gpus

SAMPLE_SECONDS = 5.0
# Interval over which the first CPU utilization is measured.
FIRST_SECONDS = 0.1
MEGABYTE = 1e6


class SystemMetrics(Callback):
    """Records the latest sample at every logged step."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._latest = {**_host(FIRST_SECONDS), **_gpus()}

    def on_start(self, step: int) -> None:  # noqa: ARG002
        """Start sampling in a thread."""
        threading.Thread(target=self._run, name="system metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            self._latest = {**_host(None), **_gpus()}

    def metrics(self, step: Step, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """The latest sample."""
        return self._latest if step.logged else {}

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        """Tell the thread to stop, without waiting for it."""
        self._ending.set()


def _host(seconds: float | None) -> dict[str, float]:
    """CPU and memory use, over the next `seconds` or since the last call; empty without psutil."""
    try:
        import psutil
    except ImportError:
        return {}
    memory, process = psutil.virtual_memory(), psutil.Process()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(seconds),
        "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/process_memory_usage_megabytes": process.memory_info().rss / MEGABYTE,
    }


def _gpus() -> dict[str, float]:
    """Use of every GPU visible to CUDA, by CUDA index; empty if they cannot be queried."""
    try:
        found = list_gpus()
    except DeviceError:
        return {}
    sample: dict[str, float] = {}
    for number, gpu in enumerate(found):
        used = gpu.total_bytes - gpu.free_bytes
        sample |= {
            f"system/gpu_{number}_utilization_percentage": gpu.busy_percent,
            f"system/gpu_{number}_memory_usage_megabytes": used / MEGABYTE,
            f"system/gpu_{number}_memory_usage_percentage": 100 * used / gpu.total_bytes,
        }
    return sample
