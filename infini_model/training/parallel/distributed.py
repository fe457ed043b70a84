"""The ranks of one training: who they are, how they add up numbers, and how they agree to stop.

Started by torchrun, a process reads its place from the environment and joins the others by nccl
(CUDA) or gloo (CPU). Started as plain Python it is alone, and no process group exists.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from infini_model.runtime.errors import DeviceError
from infini_model.training.launch.devices import physical_gpu
from infini_model.training.launch.failures import STOPS


@dataclass(frozen=True)
class World:
    """The place of this process among all; `gpu` is the physical number of its GPU, if known."""

    rank: int
    size: int
    device: torch.device
    gpu: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes checkpoints and metrics."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` added up over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [N] of every rank, [ranks, N], on every rank."""
        if self.size == 1:
            return values.unsqueeze(0)
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def from_main(self, value: int) -> int:
        """Rank 0's `value`, on every rank."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())


def choose_device(gpus: str, local_rank: int) -> torch.device:
    """The device of a rank: the CUDA device of its local number, or the CPU.

    `gpus` is `launch.gpus`; the launcher has already narrowed CUDA_VISIBLE_DEVICES to the chosen
    ones. Raises `DeviceError` where CUDA was asked for and is not there, or ranks outnumber GPUs.
    """
    if gpus == "cpu" or (gpus == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(f"launch.gpus={gpus}: no CUDA device is visible to this process")
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"process {local_rank} of this machine has no GPU: {torch.cuda.device_count()} visible"
        )
    return torch.device("cuda", local_rank)


def add_up_in_order() -> None:
    """Have CUDA take the algorithms that give the same bits each time, where it has them."""
    # Read by cuBLAS when it starts; without a workspace of its own a stream's sums vary.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # It would also fill every new tensor, which costs time and decides nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def join_world(gpus: str) -> Iterator[World]:
    """Join the other ranks that torchrun started, or be the only one; leave when the block ends.

    Raises `DeviceError` as `choose_device` does.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(gpus, local_rank)
    world = World(rank, size, device, physical_gpu(local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield world
        return
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        # All on one machine: no other one may join, and no odd host name is looked up.
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield world
    # Not in a `finally`: after an error the others may be gone, and leaving would wait for them.
    dist.destroy_process_group()


class StopSignals:
    """Notes `STOPS` instead of dying of them, so that the work can be saved first.

    One that is ignored, as SIGHUP is below `nohup`, stays so.
    """

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._previous: dict[int, signal.Handlers | None] = {}

    def __enter__(self) -> StopSignals:
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.add(number)

    def as_counts(self) -> list[float]:
        """For each of `STOPS`, 1 if it came to this rank: summed over the ranks, all agree."""
        return [float(number in self._received) for number in STOPS]


def stop_of(counts: list[float]) -> int | None:
    """The signal that came to any rank, given the summed `StopSignals.as_counts`, or None."""
    return next((int(number) for number, count in zip(STOPS, counts, strict=True) if count), None)
