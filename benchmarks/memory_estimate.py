"""The memory estimate of a training, compared with the measured peak of its tensors.

Each case is a small model, of which one part of the estimate is large: activations, weights, the
loss, or what FSDP gathers. It takes two steps, and the peak is that of the second. On a GPU it is
PyTorch's `max_memory_allocated`, on a CPU the allocations that the profiler saw. DDP has two
processes; under FSDP one of two runs, whose collectives allocate and send nothing. The ratio is
estimate / measured. The cases of as many processes share what is started for them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Cell, publish, run, spread
from infini_model.config import Config, merge, validate
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.lora import initial_adapters
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.training.distributed import World, choose_device, join_world
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel import TrainModule, build_module
from infini_model.training.sizing.estimate import Device, MemoryEstimate, estimate_memory
from infini_model.training.sizing.shape import with_objective

Tree = dict[str, Any]

CUDA = torch.cuda.is_available()
MEBIBYTE = 1 << 20
# The estimate may be wrong by this share.
TOLERANCE = 0.15
SMALL: Tree = {
    "packing": {"context_length": 512},
    "model": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 704,
        "segment_length": 128,
    },
    "training": {"batch_size": 4},
    "launch": {"gpus": "auto" if CUDA else "cpu"},
}
HEAVY: Tree = {
    "model": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
    "training": {"batch_size": 1},
}
LORA: Tree = {
    "model": {"memory_key_shift": True},
    "training": {"lora": {"target_modules": ["q_proj", "v_proj", "down_proj"]}},
}
RECOMPUTED: Tree = {"launch": {"gradient_checkpointing": True}}
BF16: Tree = {"training": {"precision": "bf16"}}
FSDP: Tree = {"launch": {"strategy": "fsdp"}}
ACCUMULATED: Tree = {"training": {"gradient_accumulation_steps": 3}}
LARGE_VOCABULARY: Tree = {"model": {"vocab_size": 50_000}}
# Settings laid over `SMALL`, and the number of processes.
CASES: dict[str, tuple[list[Tree], int]] = {
    "activations": ([], 1),
    "tiled kernel": ([{"model": {"segment_length": 256}}], 1),
    "16 bits": ([BF16], 1),
    "grouped heads": ([{"model": {"num_attention_heads": 8, "num_key_value_heads": 2}}], 1),
    "long window": (
        [
            {"packing": {"mode": "aligned", "context_length": 4096}},
            {"model": {"segment_length": 512}, "training": {"batch_size": 1}},
        ],
        1,
    ),
    "no memory": ([{"model": {"memory": "none"}}], 1),
    "delta rule": (
        [
            {"packing": {"context_length": 2048}, "training": {"batch_size": 1}},
            {"model": {"memory": "delta", "segment_length": 64}},
        ],
        1,
    ),
    "plain attention": ([{"launch": {"attention_backend": "math"}}], 1),
    "recomputed": ([RECOMPUTED, {"model": {"num_hidden_layers": 8}}], 1),
    "recomputed in 16 bits": ([RECOMPUTED, BF16, {"model": {"num_hidden_layers": 8}}], 1),
    "weights": ([HEAVY], 1),
    "accumulated": ([HEAVY, ACCUMULATED], 1),
    "large vocabulary": ([LARGE_VOCABULARY], 1),
    "large vocabulary in 16 bits": ([LARGE_VOCABULARY, BF16], 1),
    "tied embeddings": ([LARGE_VOCABULARY, {"model": {"tie_word_embeddings": True}}], 1),
    "masked diffusion": (
        [
            {"model": {"memory": "none", "segment_length": 512}},
            {"training": {"objective": "masked_diffusion"}},
        ],
        1,
    ),
    "block diffusion": ([{"training": {"objective": "block_diffusion"}}], 1),
    "LoRA": ([LORA], 1),
    "LoRA in 16 bits": ([LORA, BF16], 1),
    "DDP": ([HEAVY], 2),
    "FSDP": ([HEAVY, FSDP], 2),
    "FSDP, accumulated": ([HEAVY, FSDP, ACCUMULATED], 2),
    "FSDP, recomputed in 16 bits": ([HEAVY, FSDP, RECOMPUTED, BF16], 2),
    "FSDP, large vocabulary": ([HEAVY, FSDP, LARGE_VOCABULARY], 2),
}


def settings(name: str) -> Tree:
    """The settings of a case."""
    tree = SMALL
    for change in CASES[name][0]:
        tree = merge(tree, change)
    return tree


def complete(tree: Tree) -> Config:
    """The configuration of a case, without the weights that LoRA begins from."""
    lora = tree["training"].get("lora")
    rest = merge(tree, {"training": {"lora": None}})
    config = with_objective(validate(rest))
    if lora is None:
        return config
    section = type(config.training).model_validate(tree["training"])
    return config.updated(training=section)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_estimate", description=__doc__
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
    parser.add_argument("--peaks", action="store_true", help="only measure, in this process")
    return parser.parse_args()


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


def _replica(config: Config, world: World) -> tuple[TrainModule, LossModule]:
    objective, lora = make_objective(config), config.training.lora
    if lora is None:
        module = build_module(config, objective, None, world)
        return TrainModule(module, config, world), module
    # Without a folder of pretrained weights, their values are arbitrary.
    with torch.device("meta"):
        model = InfiniLlama(config.model, lora=lora)
    drawn = {n: torch.randn(p.shape, dtype=p.dtype) / 64 for n, p in model.named_parameters()}
    model.assign(drawn | initial_adapters(model))
    module = LossModule(model.to(world.device), objective)
    model.model.gradient_checkpointing = config.launch.gradient_checkpointing
    return TrainModule(module, config, world), module


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


def print_peaks(names: list[str]) -> None:
    """Measure the cases in this process; rank 0 prints a line of JSON: the peaks in bytes."""
    torch.set_num_threads(1)
    peaks = {}
    for name in names:
        config = complete(settings(name))
        with world_of(config, CASES[name][1]) as world:
            peaks[name] = peak_of_step(config, world)
        gc.collect()  # autograd's graphs are cycles
    if world.is_main:
        print(json.dumps(peaks))


def started_processes(name: str) -> int:
    """Processes to start for a case: under FSDP one, whose group sends nothing."""
    is_sharded = complete(settings(name)).launch.strategy == "fsdp"
    return 1 if is_sharded else CASES[name][1]


def measured(names: list[str], processes: int) -> dict[str, int]:
    """Bytes at the peak of rank 0, by case; `processes` are those of torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher = torchrun if processes > 1 else []
    ended = run(
        [*launcher, "-m", "benchmarks.memory_estimate", "--peaks", "--only", *names], threads=1
    )
    peaks: dict[str, int] = json.loads(ended.last_line)
    return peaks


def row(name: str, estimate: MemoryEstimate, peak: int) -> dict[str, Cell]:
    """A line of the table."""
    return {
        "": name,
        "processes": CASES[name][1],
        "measured MiB": peak // MEBIBYTE,
        "estimate MiB": estimate.total // MEBIBYTE,
        "estimate / measured": estimate.total / peak,
        "parts in GiB": str(estimate).partition(" GiB ")[2].strip("()"),
    }


def main() -> None:
    """Measure all cases and print the results."""
    options = parse()
    asked, rows, ratios = options.only, [], {}
    if options.peaks:
        print_peaks(asked)
        return
    device: Device = "cuda" if CUDA else "cpu"
    started = {name: started_processes(name) for name in asked}
    for processes in sorted(set(started.values())):
        if CUDA and processes > torch.cuda.device_count():
            continue
        peaks = measured([name for name in asked if started[name] == processes], processes)
        for name, peak in peaks.items():
            estimate = estimate_memory(complete(settings(name)), CASES[name][1], device)
            ratios[name] = spread([estimate.total / peak])
            rows.append(row(name, estimate, peak))
    publish(
        "memory_estimate",
        "Estimated memory of a training process, and the peak of its second step",
        rows,
        ratios,
        dict.fromkeys(ratios, 1 - TOLERANCE),
        dict.fromkeys(ratios, 1 + TOLERANCE),
    )


if __name__ == "__main__":
    main()
