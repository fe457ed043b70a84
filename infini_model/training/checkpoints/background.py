"""Background writing of checkpoints.

Training pauses only while tensors are copied to host memory; a thread writes the copy to disk.
There is one copy and at most one checkpoint in progress: the next one waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from infini_model.model.llama import InfiniLlama
from infini_model.training.checkpoints.checkpoint import SEPARATOR, Snapshot
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import gathered

log = logging.getLogger(__name__)


class Writer:
    """A thread that runs one job at a time; a job's exception is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread, after the previous one. Re-raises the previous job's error."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Re-raise the error of a finished job, without waiting for a running one."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the job, if any. Re-raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the job and stop the thread; an error not yet raised is logged."""
        self._thread.shutdown(wait=True)
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - must not mask the error being raised
            log.warning("%s", error)


class HostCopy:
    """Takes snapshots into reusable host buffers, page-locked for CUDA tensors.

    A snapshot is valid until the next one is taken.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: dict[str, Tensor] = {}

    def preallocate(self, model: InfiniLlama, optimizer: torch.optim.Optimizer) -> None:
        """Allocate the buffers in advance, so that the first snapshot does not stall on it."""
        if self._world.is_main:
            for name, tensor in _tensors(model, optimizer):
                self._buffer_for(name, tensor).zero_()

    def take(self, model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy the state of a checkpoint. Call it on all ranks; only rank 0 gets the tensors."""
        copies = {name: self._copy(name, tensor) for name, tensor in _tensors(model, optimizer)}
        names = dict(model.named_parameters())
        parameters = {name: copy for name, copy in copies.items() if name in names}
        moments = {name: copy for name, copy in copies.items() if name not in names}
        generators = {
            name: self._world.gather(state.to(self._world.device)).cpu()
            for name, state in _generator_states(self._world.device).items()
        }
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return Snapshot(model.config, parameters, moments, generators)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` to the buffer of `name`; complete once CUDA has been synchronized."""
        tensor = gathered(tensor.detach())
        if not self._world.is_main:
            return torch.empty(0)
        return self._buffer_for(name, tensor).copy_(tensor, non_blocking=True)

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer for `tensor`; a sharded tensor has the shape of the whole."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        return self._buffers[name]


def _tensors(model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name: what is trained, then AdamW's moments of each."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    yield from trained.items()
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}{SEPARATOR}{key}", value


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's default generators that this process uses, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(generators: dict[str, Tensor], world: World) -> None:
    """Restore this rank's random states; a rank without saved states keeps its own."""
    for name, states in generators.items():
        if world.rank >= len(states):
            continue
        # A copy: torch crashes on a view with a storage offset.
        state = states[world.rank].clone()
        if name == "cpu":
            torch.set_rng_state(state)
        elif world.device.type == "cuda":
            torch.cuda.set_rng_state(state, world.device)
