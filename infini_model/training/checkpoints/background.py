"""Checkpoints that are written while the training goes on.

The training stands still only while its tensors are copied to the host; one thread turns the copy
into files. There is one copy, and at most one checkpoint in the making: the next waits for it.
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
    """One thread for one job at a time; what went wrong in it is raised to who asks next."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread, after the one before it. Raises what that one raised."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Raise what a finished job raised, without waiting for one that is not."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is left to do. Raises what the last job raised, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the job and end the thread; an error that nobody asked for is logged."""
        self._thread.shutdown(wait=True)
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - another error is on its way to the caller
            log.warning("%s", error)


class HostCopy:
    """Takes snapshots into the same room on the host each time: page-locked where CUDA is used.

    A snapshot is valid until the next one is taken.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._room: dict[str, Tensor] = {}

    def make_room(self, model: InfiniLlama, optimizer: torch.optim.Optimizer) -> None:
        """Get the memory of a snapshot ahead of the first one, which would stand still for it."""
        if self._world.is_main:
            for name, tensor in _tensors(model, optimizer):
                self._room_for(name, tensor).zero_()

    def take(self, model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy what a checkpoint holds. Call it on all ranks; rank 0 alone gets the tensors."""
        copies = {name: self._copied(name, tensor) for name, tensor in _tensors(model, optimizer)}
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

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` in this process's room for `name`; not before CUDA has been waited for."""
        tensor = gathered(tensor.detach())
        if not self._world.is_main:
            return torch.empty(0)
        return self._room_for(name, tensor).copy_(tensor, non_blocking=True)

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        """The room for `tensor`, which may be one rank's part of it: its shape is of the whole."""
        if name not in self._room:
            self._room[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        return self._room[name]


def _tensors(model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds: the parameters, then AdamW's moments of each, by name."""
    yield from model.named_parameters()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}{SEPARATOR}{key}", value


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's own generators that this process draws from, uint8."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(generators: dict[str, Tensor], world: World) -> None:
    """Give this rank the random states it had; a rank that was not there keeps its own."""
    for name, states in generators.items():
        if world.rank >= len(states):
            continue
        # A copy: torch crashes on a view that begins inside its storage.
        state = states[world.rank].clone()
        if name == "cpu":
            torch.set_rng_state(state)
        elif world.device.type == "cuda":
            torch.cuda.set_rng_state(state, world.device)
