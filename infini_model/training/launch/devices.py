"""Which GPUs this machine has, how busy they are, and which of them a training gets.

Asked of the driver through NVML, without starting CUDA; where NVML is not installed, of torch.

A training holds a lock for each of its GPUs, or one for the CPU, below `devices/` of the output
folder. The kernel releases them when the holder ends, however it ends, and no server is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infini_model.config import Config
from infini_model.runtime.errors import DataError, DeviceError
from infini_model.runtime.holders import Holder, hold, holder_of
from infini_model.runtime.runs import owner_of
from infini_model.runtime.storage import lock, make_folder, named_os_errors

POLL_SECONDS = 0.5
# From one line that says what a training waits for to the next.
REPEAT_SECONDS = 60.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA may use.

    Attributes:
        identifier: What CUDA_VISIBLE_DEVICES calls it: its number in PCI order, or its UUID.
        name: The maker's name for it.
        free_bytes: Memory that no process holds.
        total_bytes: Memory in all.
        busy_percent: Share of the last moment in which it computed, 0 to 100.
        uuid: Its name that is the same in every process and container, whatever is visible there.
    """

    identifier: str
    name: str
    free_bytes: int
    total_bytes: int
    busy_percent: int
    uuid: str


@dataclass(frozen=True)
class Driver:
    """The driver of the GPUs: its version, and the newest CUDA that it runs."""

    version: str
    cuda: tuple[int, int]


def find_driver() -> Driver | None:
    """The driver, as NVML tells it; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        # As 13020 for 13.2.
        number = int(pynvml.nvmlSystemGetCudaDriverVersion())
        return Driver(
            str(pynvml.nvmlSystemGetDriverVersion()), (number // 1000, number % 1000 // 10)
        )
    finally:
        pynvml.nvmlShutdown()


def _visible() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES as a list, or None where it is not set and all are visible."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    identifiers = [part.strip() for part in value.split(",") if part.strip()]
    # As CUDA reads it: the first invalid entry, -1 by custom, hides itself and the rest.
    return identifiers[: identifiers.index("-1")] if "-1" in identifiers else identifiers


def _ask_nvml(visible: list[str] | None) -> list[Gpu]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
        identifiers = [str(i) for i in range(count)] if visible is None else visible
        return [_ask_nvml_about(identifier, count) for identifier in identifiers]
    finally:
        pynvml.nvmlShutdown()


def _ask_nvml_about(identifier: str, count: int) -> Gpu:
    import pynvml

    try:
        if identifier.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(identifier))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(identifier)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name, uuid = (
            str(get(handle)) for get in (pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetUUID)
        )
    except pynvml.NVMLError as error:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES: {identifier} does not exist; this machine has {count} GPUs"
        ) from error
    try:
        busy = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        # A slice of a GPU (MIG) does not say.
        busy = 0
    return Gpu(identifier, name, int(memory.free), int(memory.total), busy, uuid)


def _ask_torch(visible: list[str] | None) -> list[Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        identifier = str(index) if visible is None else visible[index]
        about = torch.cuda.get_device_properties(index)
        found.append(Gpu(identifier, about.name, free, total, 0, f"GPU-{about.uuid}"))
    return found


def list_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; empty where there is none.

    Raises `DeviceError` if that variable names a GPU that does not exist.
    """
    visible = _visible()
    if visible == []:
        return []
    try:
        found = _ask_nvml(visible)
    except ImportError:
        found = _ask_torch(visible)
    return found


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA that torch was built for, None for a torch without."""
    import torch

    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def choose_gpus(gpus: str) -> list[Gpu]:
    """The GPUs that `launch.gpus` means: none for `cpu`, and for `auto` where there is none.

    `auto` puts the one with the most free memory first, among equals the least busy one; numbers
    in a list count the visible GPUs from 0.

    Raises `DeviceError` for a GPU that does not exist, or where torch was built without CUDA.
    """
    found = [] if gpus == "cpu" else list_gpus()
    if found and torch_cuda() is None:
        if gpus == "auto":
            return []
        raise DeviceError(f"launch.gpus={gpus}: the installed torch was built without CUDA")
    if gpus == "auto":
        # Rounded to GiB: a few bytes more are no reason to prefer a busy one.
        return sorted(found, key=lambda gpu: (-(gpu.free_bytes >> 30), gpu.busy_percent))
    if gpus == "cpu":
        return []
    there = f"there are {len(found)}, from 0" if found else "this machine has none"
    if gpus == "all":
        if not found:
            raise DeviceError(f"launch.gpus=all: no GPU; {there}")
        return found
    chosen = []
    for number in gpus.split(","):
        if int(number) >= len(found):
            raise DeviceError(f"launch.gpus={gpus}: GPU {number} does not exist; {there}")
        chosen.append(found[int(number)])
    return chosen


def first_device(gpus: str) -> str:
    """The first GPU that a training of `launch.gpus` would get, by its number for CUDA, or cpu.

    Raises `DeviceError` as `choose_gpus` does.
    """
    chosen = choose_gpus(gpus)
    if not chosen:
        return "cpu"
    visible = [gpu.identifier for gpu in list_gpus()]
    return f"cuda:{visible.index(chosen[0].identifier)}"


@dataclass(frozen=True)
class _Slot:
    """A device that one training holds at a time; `gpu` is None for the CPU."""

    label: str
    file: str
    gpu: Gpu | None


@dataclass(frozen=True)
class _Demand:
    """What a training needs: so many of these slots, the first ones first.

    `shares` where the other machines of the same training may be this one, too.
    """

    slots: Sequence[_Slot]
    needed: int
    folder: Path
    holder: Holder
    shares: bool

    def __str__(self) -> str:
        if self.slots[0].gpu is None:
            return self.slots[0].label
        if self.needed == len(self.slots):
            return ", ".join(slot.label for slot in self.slots)
        return f"{self.needed} of {len(self.slots)} GPUs"


def _slots(config: Config) -> tuple[list[_Slot], int]:
    """The devices that the settings allow, in the order of preference, and how many they need."""
    gpus, processes = choose_gpus(config.launch.gpus), config.launch.processes
    if not gpus:
        return [_Slot("the CPU", f"cpu-{socket.gethostname()}.lock", None)], 1
    needed = processes or len(gpus)
    if needed > len(gpus):
        raise DeviceError(f"launch.processes={needed}: only {len(gpus)} GPUs were chosen")
    # Of a list it is the first ones; auto takes any.
    allowed = gpus if config.launch.gpus == "auto" else gpus[:needed]
    slots = [
        _Slot(f"GPU {gpu.identifier}", f"gpu-{gpu.uuid.removeprefix('GPU-')}.lock", gpu)
        for gpu in allowed
    ]
    return slots, needed


@contextlib.contextmanager
def reserve(
    config: Config,
    run_dir: Path,
    *,
    on_line: Callable[[str], None],
    stop: Callable[[], Exception | None] = lambda: None,
) -> Iterator[list[Gpu]]:
    """Hold the devices of a training while the block runs; yields its GPUs, none for the CPU.

    Waits until all of them are free at once. The machines of one training share a device where
    they are one and the same machine.

    Args:
        config: The whole configuration.
        run_dir: The run folder, which others that wait are told.
        on_line: Gets a line that says what it waits for and who holds it, once a minute.
        stop: Asked twice a second while waiting; what it returns is raised.

    Raises:
        DeviceError: A GPU that does not exist, or fewer GPUs than processes.
        UserError: The output folder or the run folder cannot be written.
    """
    slots, needed = _slots(config)
    owner = None
    with contextlib.suppress(DataError):
        owner = owner_of(run_dir)
    demand = _Demand(
        slots,
        needed,
        make_folder(config.run.output_dir / "devices"),
        Holder.current(run_dir, owner),
        shares=config.launch.num_nodes > 1,
    )
    with contextlib.ExitStack() as stack:
        taken = _wait_for(demand, stack, waiting_note(run_dir), on_line, stop)
        yield [slot.gpu for slot in taken if slot.gpu is not None]


def waiting_note(run_dir: Path) -> Path:
    """The file that says what a run waits for; it is there only while it waits."""
    return run_dir / "logs" / "waiting"


def _wait_for(
    demand: _Demand,
    stack: contextlib.ExitStack,
    note: Path,
    on_line: Callable[[str], None],
    stop: Callable[[], Exception | None],
) -> list[_Slot]:
    next_line = 0.0
    try:
        while True:
            taken, others = _try_to_take(demand, stack)
            if taken:
                return taken
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + REPEAT_SECONDS
                line = f"Waiting for {demand}: {'; '.join(others)}"
                make_folder(note.parent)
                with named_os_errors(note):
                    note.write_text(line, encoding="utf-8")
                on_line(line)
            if reason := stop():
                raise reason
            time.sleep(POLL_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            note.unlink()


def _try_to_take(demand: _Demand, stack: contextlib.ExitStack) -> tuple[list[_Slot], list[str]]:
    """Take all that is needed, to be released by `stack`, or nothing; then also who holds it."""
    taken, others = [], []
    # One training at a time, so that two that need each other's devices cannot both fail for ever.
    with lock(demand.folder / ".lock"), contextlib.ExitStack() as held:
        for slot in demand.slots:
            path = demand.folder / slot.file
            if held.enter_context(hold(path, demand.holder)):
                taken.append(slot)
            else:
                other = holder_of(path) or Holder()
                if demand.shares and other.run == demand.holder.run:
                    taken.append(slot)
                else:
                    others.append(f"{slot.label} is held by {other}, which trains {other.run}")
            if len(taken) == demand.needed:
                stack.enter_context(held.pop_all())
                return taken, []
    return [], others
