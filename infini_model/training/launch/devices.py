"""The GPUs of this machine, how busy they are, and which ones `launch.gpus` means.

Read from the driver through NVML, without starting CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infini_model.runtime.errors import DeviceError

# Environment variable: the physical numbers of the GPUs of this machine's ranks, by local rank,
# separated by commas; empty on the CPU.
GPU_NUMBERS = "INFINI_GPU_NUMBERS"
# What the UUID of a slice of a GPU begins with.
MIG = "MIG-"

log = logging.getLogger(__name__)
# Devices are listed again and again.
_warn_once = functools.cache(log.warning)


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA may use.

    Attributes:
        identifier: What CUDA_VISIBLE_DEVICES calls it: its number in PCI order, or its UUID.
        number: Its physical number: the one in PCI order, also of the GPU that a MIG slice is on.
        busy_percent: Recent utilization, 0 to 100.
        uuid: Identifier that is the same in every process and container, whatever is visible there.
        capability: Compute capability, (9, 0) for Hopper; None if the driver does not tell.
    """

    identifier: str
    number: int
    name: str
    free_bytes: int
    total_bytes: int
    busy_percent: int
    uuid: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Driver:
    """The GPU driver: its version, and the newest CUDA version that it supports."""

    version: str
    cuda: tuple[int, int]


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    """NVML, while the block runs. Raises `NVMLError` if it does not work, or there is no GPU."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def find_driver() -> Driver | None:
    """The driver as reported by NVML; None if there is none."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError), _nvml():
        # 13020 means 13.2.
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return Driver(version, (number // 1000, number % 1000 // 10))
    return None


def _visible() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list; None if it is not set, so that all GPUs are visible."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    identifiers = [part.strip() for part in value.split(",") if part.strip()]
    # As in CUDA: the first invalid entry, by convention -1, hides itself and all that follow.
    return identifiers[: identifiers.index("-1")] if "-1" in identifiers else identifiers


def _identifiers(number: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls a GPU: its number, or the UUIDs of its slices if it has."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    return [str(pynvml.nvmlDeviceGetUUID(each)) for each in _slices(handle)] or [str(number)]


def _slices(handle: Any) -> Iterator[Any]:
    """The MIG slices of a GPU."""
    import pynvml

    count = 0
    # Fails for a GPU that cannot be divided.
    with contextlib.suppress(pynvml.NVMLError):
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0
    for number in range(count):
        # Fails for a place that holds no slice.
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


def _find(identifier: str, count: int) -> tuple[Any, int]:
    """A GPU by its number, or a GPU or slice by the beginning of its UUID.

    Returns its handle, and the number of the GPU. Raises `NVMLError` if there is none, or several.
    """
    import pynvml

    if identifier.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(identifier)), int(identifier)
    found = [
        (handle, number)
        for number in range(count)
        for whole in [pynvml.nvmlDeviceGetHandleByIndex(number)]
        for handle in (whole, *_slices(whole))
        if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(identifier)
    ]
    if len(found) != 1:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return found[0]


def _query_nvml(identifier: str, count: int) -> Gpu:
    import pynvml

    try:
        handle, number = _find(identifier, count)
        whole = pynvml.nvmlDeviceGetHandleByIndex(number)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES: {identifier} does not exist; this machine has {count} GPUs"
        ) from error
    busy = 0
    # Not available for a MIG slice.
    with contextlib.suppress(pynvml.NVMLError):
        busy = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    free, total, capability = int(memory.free), int(memory.total), (int(major), int(minor))
    return Gpu(identifier, number, str(name), free, total, busy, str(uuid), capability)


def list_gpus() -> list[Gpu]:
    """The GPUs that are visible under CUDA_VISIBLE_DEVICES, in its order; none without a driver.

    Raises `DeviceError` if that variable names a GPU that does not exist, or NVML fails on a
    machine on which CUDA works.
    """
    visible = _visible()
    if visible == []:
        return []
    try:
        import pynvml
    except ImportError as error:
        return _none_found(error)
    try:
        with _nvml():
            count = pynvml.nvmlDeviceGetCount()
            if visible is None:
                visible = [name for number in range(count) for name in _identifiers(number)]
            return [_query_nvml(identifier, count) for identifier in visible]
    except pynvml.NVMLError as error:
        return _none_found(error)


def _none_found(error: Exception) -> list[Gpu]:
    """No GPUs, where NVML fails and CUDA has none either. Raises `DeviceError` if it has some."""
    try:
        status = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        return []
    if status == 0:
        raise DeviceError(
            f"CUDA works, but NVML, which lists the GPUs, fails ({error}): make nvidia-smi work "
            "(a container needs the driver capability utility), pip install nvidia-ml-py, or set "
            "launch.gpus=cpu"
        ) from error
    _warn_once(f"no GPU is used: NVML fails ({error}), and so does CUDA (error {status})")
    return []


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that torch was built for; None for a CPU-only build."""
    import torch

    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def choose_gpus(gpus: str) -> list[Gpu]:
    """The GPUs that `launch.gpus` selects; empty for `cpu`, and for `auto` if there is none.

    `auto` sorts by free memory, most first, then by utilization, least first. Numbers in a list
    count the visible GPUs from 0.

    Raises `DeviceError` for a GPU that does not exist, or if torch was built without CUDA.
    """
    found = [] if gpus == "cpu" else list_gpus()
    if not found and gpus in ("cpu", "auto"):
        return []
    if found and torch_cuda() is None:
        without = "the installed torch was built without CUDA"
        if gpus != "auto":
            raise DeviceError(f"launch.gpus={gpus}: {without}")
        _warn_once(f"{len(found)} GPUs are not used: {without}")
        return []
    if gpus == "auto":
        # In GiB: a few bytes more free are no reason to prefer a busier GPU.
        found = sorted(found, key=lambda gpu: (-(gpu.free_bytes >> 30), gpu.busy_percent))
        # CUDA shows a process one slice only, and none beside whole GPUs.
        return [gpu for gpu in found if not gpu.identifier.startswith(MIG)] or found[:1]
    if gpus == "all":
        if not found:
            raise DeviceError("launch.gpus=all: no GPU on this machine")
        return found
    chosen = []
    for number in gpus.split(","):
        if int(number) >= len(found):
            count = f"there are {len(found)}, numbered from 0" if found else "this machine has none"
            raise DeviceError(f"launch.gpus={gpus}: GPU {number} does not exist; {count}")
        chosen.append(found[int(number)])
    return chosen


def first_device(gpus: str) -> str:
    """The first device that `launch.gpus` selects, as torch calls it: `cuda:N` or `cpu`.

    Raises `DeviceError` as `choose_gpus` does.
    """
    chosen = choose_gpus(gpus)
    if not chosen:
        return "cpu"
    if chosen[0].identifier.startswith(MIG):
        return "cuda:0"
    visible = [gpu.identifier for gpu in list_gpus()]
    return f"cuda:{visible.index(chosen[0].identifier)}"


def number_visible_gpus(gpus: str) -> None:
    """Set `GPU_NUMBERS` in a rank that was not started by the launcher.

    Such a rank uses the visible GPU at the index of its local rank. `gpus` is `launch.gpus`.
    """
    if GPU_NUMBERS in os.environ:
        return
    # NVML counts in PCI order, CUDA by default the fastest first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible: list[Gpu] = []
    # The numbers only serve messages; CUDA reports a device that does not exist.
    with contextlib.suppress(DeviceError):
        visible = [] if gpus == "cpu" else list_gpus()
    is_used = visible and torch_cuda()
    os.environ[GPU_NUMBERS] = ",".join(str(gpu.number) for gpu in visible) if is_used else ""


def physical_gpu(local_rank: int) -> int | None:
    """The physical number of the GPU of a rank on this machine; None on the CPU.

    Also None in a process that is not a rank of `python -m infini_model.training`.
    """
    numbers = [int(part) for part in os.environ.get(GPU_NUMBERS, "").split(",") if part]
    return numbers[local_rank] if local_rank < len(numbers) else None


def log_prefix(rank: int, gpu: int | None, world_size: int) -> str:
    """Return what begins the log lines of a rank: its physical GPU, or the CPU."""
    if gpu is not None:
        return f"GPU{gpu}"
    return "CPU" if world_size == 1 else f"CPU{rank}"
