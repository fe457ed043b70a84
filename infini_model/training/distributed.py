"""The process group of a training: ranks, collectives, and agreeing on settings and on stopping.

Under torchrun, a process reads its rank from the environment and joins a process group: nccl on
CUDA, gloo on the CPU. In plain Python there is one process and no process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from pydantic_core import to_json
from torch import Tensor

from infini_model.config import Config, LaunchConfig, differences
from infini_model.runtime.errors import ConfigError, DeviceError
from infini_model.runtime.processes import STOPS
from infini_model.runtime.records import Record
from infini_model.training.launch.devices import GPU_NUMBERS, physical_gpu
from infini_model.training.launch.heartbeat import PAUSE_LIMIT_SECONDS

T = TypeVar("T")

# What the ranks do together, and when: besides what decides the weights.
TOGETHER: dict[str, set[str]] = {
    "launch": {"strategy", "gradient_checkpointing", "deterministic"},
    "logging": {"logging_steps", "eval_steps", "sample_steps", "debug"},
    "checkpoint": {"save_steps"},
    "evaluation": {"max_windows", "during"},
}


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of ranks, and its device.

    `gpu` is the physical number of its GPU, if known, and `local_size` the number of ranks on this
    machine. `group` connects the ranks; None is the default process group.
    """

    rank: int
    size: int
    device: torch.device
    gpu: int | None = None
    local_size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes checkpoints and metrics."""
        return self.rank == 0

    def beside(self) -> World:
        """The same ranks, connected on the CPU for a thread beside the training.

        Call it on all ranks. They wait for each other without limit: the launcher ends a hang.
        """
        group = dist.new_group(timeout=timedelta(days=365), backend="gloo")
        return replace(self, device=torch.device("cpu"), group=group)

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all ranks, in place; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """The `values` [N] of all ranks as [ranks, N], on every rank."""
        if self.size == 1:
            return values.unsqueeze(0)
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values, group=self.group)
        return torch.stack(everyone)

    def all_gather_text(self, text: str) -> list[str]:
        """The `text` of each rank, on every rank."""
        own = _as_tensor(text.encode()).to(self.device)
        sizes = self.all_gather(torch.tensor([len(own)], device=self.device)).flatten().tolist()
        padded = own.new_zeros(max(1, *sizes))
        padded[: len(own)] = own
        rows = zip(self.all_gather(padded), sizes, strict=True)
        return [_as_bytes(row[:size]).decode() for row, size in rows]

    def broadcast(self, read: Callable[[], T], kind: type[Record] | None = None) -> T:
        """The JSON value that `read` returns on rank 0, on every rank; only rank 0 calls it.

        As JSON, not as torch's own broadcast of objects, which unpickles. `kind` is that of the
        record that `read` returns, if any.
        """
        content = _as_tensor(to_json(read()) if self.is_main else b"")
        size = self.broadcast_tensor(lambda: torch.tensor([len(content)]), torch.empty(1).long())
        everywhere = self.broadcast_tensor(lambda: content, content.new_empty(int(size)))
        value: Any = json.loads(_as_bytes(everywhere))
        return cast("T", value if value is None or kind is None else kind.model_validate(value))

    def broadcast_tensor(self, read: Callable[[], Tensor], like: Tensor, source: int = 0) -> Tensor:
        """As `broadcast`, of a tensor of `like`'s shape and dtype, on this rank's device."""
        if self.size == 1:
            return read()
        is_source = self.rank == source
        shared = (read() if is_source else torch.empty_like(like)).to(self.device)
        dist.broadcast(shared, src=source, group=self.group)
        return shared

    def send_to_main(self, values: Tensor, source: int) -> Tensor:
        """The `values` of rank `source`, on rank 0, which has those of its shape and dtype.

        Call it on these two ranks only.
        """
        if self.is_main:
            dist.recv(values, source, group=self.group)
        else:
            dist.send(values, 0, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.group)


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def check_agreement(config: Config, dataset_key: str, world: World) -> None:
    """Raise `ConfigError` on every rank if any has other settings or another dataset than rank 0.

    Ranks of several machines read their settings there. With different ones they would wait for
    each other for ever, or train different models and mix their gradients. The error names the
    first setting that differs, with both values.
    """
    own = {**config.identity, "dataset": dataset_key}
    for section, names in TOGETHER.items():
        values = getattr(config, section).model_dump(mode="json", include=names)
        own[section] = own.get(section, {}) | values
    first = world.broadcast(lambda: own)
    found = next(differences(first, own), None)
    difference = ""
    if found is not None:
        key, theirs, ours = found
        difference = f"{key} is {theirs!r} on the first machine, {ours!r}"
    said = world.all_gather_text(difference)
    for rank, text in enumerate(said):
        if text:
            where = "here" if rank == world.rank else f"on that of rank {rank}"
            raise ConfigError(f"{text} {where}")


def choose_device(gpus: str, local_rank: int) -> torch.device:
    """The device of a rank: the CUDA device at the index of its local rank, or the CPU.

    `gpus` is `launch.gpus`; the launcher has already set CUDA_VISIBLE_DEVICES to the selected GPUs.
    Raises `DeviceError` if CUDA was requested, or the launcher has given this rank a GPU, and torch
    cannot use it, or if ranks outnumber GPUs.
    """
    is_given = bool(os.environ.get(GPU_NUMBERS))
    if gpus == "cpu" or (gpus == "auto" and not is_given and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"launch.gpus={gpus}: no CUDA device is visible to this process; infini doctor shows "
            "whether the driver is too old for torch"
        )
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"process {local_rank} of this machine has no GPU: {torch.cuda.device_count()} visible"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make CUDA use deterministic algorithms only, until the block ends.

    Raises `ConfigError` for an operation that has none.
    """
    # cuBLAS reads it at startup; without a workspace per stream, its sums vary between runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With `warn_only` PyTorch's attention kernels stay non-deterministic, though they need not.
    torch.use_deterministic_algorithms(mode=True)
    # By default it would also fill every new tensor, which costs time and changes no result here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        operation = str(error).split(" ", 1)[0]
        raise ConfigError(
            f"launch.deterministic: {operation} is not deterministic on a GPU; set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(mode=False)


def collective_timeout(hang_timeout: float | None) -> timedelta:
    """How long a rank waits for the others, who may save a checkpoint or take a long step.

    Longer than the launcher waits for any of them: it says which one hangs, and where. By default
    NCCL would wait for ten minutes. `hang_timeout` is `launch.hang_timeout_seconds`.
    """
    return timedelta(seconds=2 * max(PAUSE_LIMIT_SECONDS, hang_timeout or 0.0))


@contextlib.contextmanager
def join_world(launch: LaunchConfig) -> Iterator[World]:
    """Join the ranks started by torchrun, if any; leave the process group when the block ends.

    Raises `DeviceError` as `choose_device` does.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(launch.gpus, local_rank)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = World(rank, size, device, physical_gpu(local_rank), local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield world
        return
    if local_size == size:
        # A single machine: other machines cannot connect, and no host name needs to resolve.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=collective_timeout(launch.hang_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    yield world
    # Not in a `finally`: after an error other ranks may be gone, and leaving would wait for them.
    dist.destroy_process_group()


class StopSignals:
    """The signals that this rank has received, such that all ranks can agree on stopping.

    `received` is from `deferred_signals`: a checkpoint is saved before the process ends.
    """

    def __init__(self, received: Sequence[int], device: torch.device) -> None:
        self._received, self._none = received, torch.zeros(len(STOPS)).double().to(device)

    def counts(self) -> Tensor:
        """For each of `STOPS`, 1 if this rank received it: summed over the ranks, all agree.

        Float64; a copy waits for the device, so it is made only for a signal.
        """
        if not self._received:
            return self._none
        return self._none.new_tensor([float(number in self._received) for number in STOPS])


def received_stop(counts: list[float]) -> int | None:
    """The signal that any rank received, given the sum of `StopSignals.counts`; else None."""
    return next((int(number) for number, count in zip(STOPS, counts, strict=True) if count), None)
