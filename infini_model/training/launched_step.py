"""An optimizer step that has been launched, and what it found, read once the device has come there.

On a GPU the host runs ahead of the device: reading a number at once would wait until the device has
nothing left to do. So the numbers of a step are copied to the host in the background, and the time
of the step is that between two events of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infini_model.runtime.processes import STOPS
from infini_model.training.callbacks import Step
from infini_model.training.distributed import received_stop


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be computing.

    Attributes:
        make_step: Makes the `Step` of what the device has found.
        numbers: Number of targets, loss, loss of this rank, gradient norm, whether fp16 overflowed,
            how many ranks received each of `STOPS`, and in fp16 the loss scale after the step,
            float64.
        scaler: State of fp16's loss scale with which its gradients were computed.
        began: When the host began it, by `time.perf_counter`.
        after: The event on the device after which the step begins there; None on the CPU.
        ready: The event after which `numbers` are valid; None on the CPU.
    """

    make_step: Callable[..., Step]
    numbers: Tensor
    scaler: Sequence[Tensor]
    began: float
    after: torch.cuda.Event | None
    ready: torch.cuda.Event | None

    def read(self) -> tuple[Step, int | None]:
        """Wait for the device; the step, and the signal that any rank received by then, if any."""
        seconds = time.perf_counter() - self.began
        if self.after is not None and self.ready is not None:
            self.ready.synchronize()
            seconds = self.after.elapsed_time(self.ready) / 1000.0
        targets, loss, rank_loss, norm, overflowed, *others = self.numbers.tolist()
        signals, scale = others[: len(STOPS)], others[len(STOPS) :]
        step = self.make_step(
            targets=round(targets),
            loss=loss,
            rank_loss=rank_loss,
            grad_norm=norm,
            loss_scale=scale[0] if scale else None,
            overflowed=bool(overflowed),
            seconds=seconds,
        )
        return step, received_stop(signals)


def copy_to_host(*numbers: Tensor) -> Tensor:
    """Single numbers as one float64 tensor on the host, valid once the device has come there."""
    stacked = torch.stack([number.double() for number in numbers])
    if not stacked.is_cuda:
        return stacked
    host = torch.empty_like(stacked, device="cpu", pin_memory=True)
    return host.copy_(stacked, non_blocking=True)


def peak_bytes(device: torch.device) -> int | None:
    """The most memory of tensors at once since the last call; None on the CPU."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def recorded_event(device: torch.device) -> torch.cuda.Event | None:
    """An event that happens when the device comes here; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
