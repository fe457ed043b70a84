"""Checkpoints of a sharded model: the pause, the time to disk, and the memory of rank 0.

Each of `--ranks` processes holds a shard of a model and of AdamW's moments under FSDP. They save it
in turns in three ways: with `shards`, which is `infini_model.training.checkpoint`, each rank writes
the rows that it holds; with `gathered` rank 0 gets all tensors, and writes them; `DCP` is
`async_save` of torch.distributed.checkpoint, which pickles its metadata. The pause is that of the
slowest rank. Memory is how much the peak of rank 0 grows, without files that are mapped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import publish, spread
from flows.presets import configure
from infini_model.config import Config
from infini_model.model.hf.config import NO_TOKENS
from infini_model.model.hf.weights import save_tensors
from infini_model.objectives import make_objective
from infini_model.training.checkpoint import Checkpointer, TrainerState
from infini_model.training.distributed import World, join_world
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel import build_module, full_tensor

OURS, GATHERED, PEER = "shards", "gathered", "DCP"
MEBIBYTE = 1 << 20
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
# Ours over the other's, at most.
LIMITS = {"pause / gathered": 0.75, "memory / gathered": 0.75, "pause / DCP": 1.0}

# Copies, and returns what waits until the copy is on disk.
Save = Callable[[Path], Callable[[], object]]


def trained(config: Config, world: World) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model, and its optimizer, which has made its moments."""
    model = build_module(config, make_objective(config), None, world).model
    optimizer = make_optimizer(model, config.training, world)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def ways(
    model: Any, optimizer: torch.optim.Optimizer, world: World, run_dir: Path
) -> dict[str, Save]:
    """The three ways, each with buffers of its own."""
    checkpointer = Checkpointer(
        *(run_dir, model, optimizer, world, None),
        tokens=NO_TOKENS,
        adapter=None,
        keep=1,
        saved_step=None,
        is_sharded=True,
    )

    steps = itertools.count()

    def shards(_folder: Path) -> Callable[[], object]:
        checkpointer.save(
            TrainerState(
                step=next(steps),
                windows_read=0,
                seed=0,
                world_size=world.size,
                dataset_key="",
                config={},
                precision="fp32",
                global_batch=1,
            )
        )
        return checkpointer.writer.wait

    def tensors() -> dict[str, torch.Tensor]:
        found = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            found |= {f"{name}/{key}": each for key, each in optimizer.state[parameter].items()}
        return {name: each.detach() for name, each in found.items()}

    copies: dict[str, torch.Tensor] = {}

    def gathered(folder: Path) -> Callable[[], object]:
        for name, tensor in tensors().items():
            whole = full_tensor(tensor)
            if world.is_main:
                copies.setdefault(name, torch.empty_like(whole)).copy_(whole)
        return lambda: save_tensors(copies, folder / "all") if world.is_main else None

    def dcp(folder: Path) -> Callable[[], object]:
        from torch.distributed.checkpoint import async_save

        saved = async_save(tensors(), checkpoint_id=folder, process_group=group)
        return saved.result

    group = dist.new_group(backend="gloo")
    return {OURS: shards, GATHERED: gathered, PEER: dcp}


def memory(*, forget: bool = False) -> int:
    """Peak memory of this process since it was last forgotten, without mapped files."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(lines[name].split()[0]) for name in ("VmHWM", "RssFile", "RssShmem")}
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) << 10


def measure(way: str, turns: int, folder: Path) -> None:
    """Save `turns` times as one rank; rank 0 writes what it measures."""
    config = configure(["quickstart"], overrides=["launch.strategy=fsdp", "launch.gpus=cpu"])
    config = config.updated(model=SHAPE)
    with join_world(config.launch) as world:
        model, optimizer = trained(config, world)
        before, rows = memory(forget=True), []
        save = ways(model, optimizer, world, folder)[way]
        for turn in range(turns):
            place = folder / f"{way}-{turn}"
            if world.is_main:
                place.mkdir()
            world.barrier()
            began = time.perf_counter()
            wait = save(place)
            pause = world.all_gather(torch.tensor([time.perf_counter() - began])).max().item()
            wait()
            world.barrier()
            rows.append({"pause": pause, "seconds": time.perf_counter() - began})
        size = 3 * sum(each.numel() * each.itemsize for each in model.parameters())
        if world.is_main:
            found = {"rows": rows, "memory": memory() - before, "bytes": size}
            (folder / "found.json").write_text(json.dumps(found))


def as_rank(rank: int, count: int, port: int, *arguments: Any) -> None:
    """Become a rank, as if started by torchrun."""
    torch.set_num_threads(1)
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    os.environ |= size | own
    measure(*arguments)


def main() -> None:
    """Measure all ways in turns and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in (OURS, GATHERED, PEER)}
    for _ in range(options.turns):
        for way, found in measured.items():
            with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
                free.close()
                arguments = (options.ranks, port, way, 3, Path(folder))
                torch.multiprocessing.spawn(as_rank, arguments, nprocs=options.ranks)
                result = json.loads(Path(folder, "found.json").read_text())
            last = result["rows"][-1]  # with buffers that exist
            relative = result["memory"] / result["bytes"]
            found.append({**last, "memory": relative, "MiB": result["bytes"] / MEBIBYTE})
    rows = [
        {
            "": way,
            "checkpoint MiB": round(found[0]["MiB"]),
            "pause ms": spread([1e3 * each["pause"] for each in found]),
            "to disk s": spread([each["seconds"] for each in found]),
            "memory of rank 0 / checkpoint": spread([each["memory"] for each in found]),
        }
        for way, found in measured.items()
    ]
    ratios = {
        f"{what} / {other}": spread(
            [
                ours[what] / theirs[what]
                for ours, theirs in zip(measured[OURS], measured[other], strict=True)
            ]
        )
        for what in ("pause", "seconds", "memory")
        for other in (GATHERED, PEER)
    }
    publish("checkpoint", "Checkpoints of a sharded model", rows, ratios, {}, LIMITS)


if __name__ == "__main__":
    main()
