"""Run by `benchmarks.memory_estimate`: the peak memory of a training step, of all its tensors.

Rank 0, under torchrun if DDP has several, prints one line of JSON: its peak in bytes, by case.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory_estimate import CASES, complete, settings
from infini_model.config import Config
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.lora import initial_adapters
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel.distributed import World, choose_device, join_world
from infini_model.training.replica import Replica
from infini_model.training.setup import build_module


@contextlib.contextmanager
def world_of(config: Config, processes: int) -> Iterator[World]:
    """That of torchrun or of this process; under FSDP that of rank 0, whose group sends nothing.

    FSDP allocates with each layer what it sends, and gloo's threads free some of that, which the
    profiler does not see: what it saw would grow with every micro-batch.
    """
    if config.launch.strategy != "fsdp":
        with join_world(config.launch) as world:
            yield world
        return
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", rank=0, world_size=processes, store=dist.HashStore())
    try:
        yield World(0, processes, choose_device(config.launch.gpus, 0))
    finally:
        dist.destroy_process_group()


def peak_of_step(config: Config, world: World) -> int:
    """Bytes of tensors that this process holds at most in the second step of a training.

    `config.model` is that of the model itself. The first step makes AdamW's moments. On a CPU the
    peak is what the profiler saw allocated on top of what was there; it sees this thread only,
    so torch must have no others.
    """
    replica, module = _replica(config, world)
    optimizer = make_optimizer(module.model, config.training)
    parameters = [*module.parameters()]

    def step() -> None:
        replica.backward(_batches(config, world))
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_grads_with_norm_(parameters, 1.0, get_total_norm(gradients))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    states = [value for state in optimizer.state.values() for value in state.values()]
    there = sum(_local_bytes(tensor) for tensor in (*parameters, *states))
    if world.size > 1 and config.launch.strategy == "ddp":
        there += sum(_local_bytes(p) for p in parameters if p.requires_grad)  # its buckets
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return there + _highest(profiler)


def _replica(config: Config, world: World) -> tuple[Replica, LossModule]:
    objective, lora = make_objective(config), config.training.lora
    if lora is None:
        module = build_module(config, objective, None, world)
        return Replica(module, config, world), module
    # Without a folder of pretrained weights, their values are arbitrary.
    with torch.device("meta"):
        model = InfiniLlama(config.model, lora=lora)
    drawn = {n: torch.randn(p.shape, dtype=p.dtype) / 64 for n, p in model.named_parameters()}
    model.assign(drawn | initial_adapters(model))
    module = LossModule(model.to(world.device), objective)
    model.model.gradient_checkpointing = config.launch.gradient_checkpointing
    return Replica(module, config, world), module


def _batches(config: Config, world: World) -> list[Batch]:
    """The micro-batches of a step, of random tokens; the first segment of each row is reset."""
    rows, length = config.training.batch_size, config.packing.context_length
    tokens = torch.randint((config.model.vocab_size or 2) - 1, (rows, 1, length + 1))
    reset = None
    if config.packing.mode == "aligned":
        reset = torch.arange(length // config.model.segment_length).eq(0).expand(rows, -1)
    batch = Batch(tokens, None, reset, torch.arange(rows)).to(world.device)
    return [batch] * config.training.gradient_accumulation_steps


def _local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this process's shard."""
    local = getattr(tensor, "to_local", lambda: tensor)()
    return int(local.numel() * local.element_size())


def _highest(profiler: profile) -> int:
    """The most bytes allocated at once since the profile began."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def main(*names: str) -> None:
    """Measure these cases of `benchmarks.memory_estimate`."""
    torch.set_num_threads(1)
    peaks = {}
    for name in names:
        config = complete(settings(name))
        with world_of(config, CASES[name][1]) as world:
            peaks[name] = peak_of_step(config, world)
        gc.collect()  # autograd's graphs are cycles
    if world.is_main:
        print(json.dumps(peaks))


if __name__ == "__main__":
    main(*sys.argv[1:])
