"""How busy and how full the machine of rank 0 is, measured beside the training.

A thread of its own asks, so that a slow driver keeps no step waiting. The names are those of
MLflow's system metrics, whose page shows them as such; `process` is rank 0 alone.
"""

from __future__ import annotations

import threading

from infini_model.runtime.errors import DeviceError
from infini_model.training.callbacks.callback import Callback, Step
from infini_model.training.callbacks.mlflow_record import Status
from infini_model.training.launch.devices import list_gpus

SAMPLE_SECONDS = 5.0
# Over which the first share of the processors' time is taken.
FIRST_SECONDS = 0.1
MEGABYTE = 1e6


class SystemMetrics(Callback):
    """Records the newest sample with every step that is logged."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._latest = {**_host(FIRST_SECONDS), **_gpus()}
        threading.Thread(target=self._run, name="system metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            self._latest = {**_host(None), **_gpus()}

    def metrics(self, step: Step, seconds: float) -> dict[str, float]:  # noqa: ARG002
        """The newest sample."""
        return self._latest if step.logged else {}

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        """Have the thread end; it is not waited for."""
        self._ending.set()


def _host(seconds: float | None) -> dict[str, float]:
    """Processors and memory, over `seconds` from now or since the last call, if psutil is there."""
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
    """Every GPU that CUDA may use, numbered as CUDA does; empty where they cannot be asked."""
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
