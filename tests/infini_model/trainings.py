"""Trainings in processes of their own, with compiled layers, and cut off."""

import functools
import os
import shutil

import torch
from ports import free_port

# The last three are imported late, by torch.optim, pyarrow and the banner: two seconds a rank.
PRELOADED = ["infini_model.training.train", "torch.distributed.fsdp", "torch._dynamo"]
PRELOADED += ["pandas", "psutil"]


def trainers(run_dir):
    """Every live process with the run folder in its arguments."""
    import psutil

    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _start(rank, count, machines, port, environment, work, *args):
    """Run `work` as one of `count` ranks, as if started by torchrun."""
    torch.set_num_threads(1)
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (count // machines)),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count // machines),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(*args)


def start_ranks(count, work, *args, machines=1):
    """Start `work` on `count` ranks in new processes: gloo may crash in a process's second group.

    They fork from a server that has imported torch and the trainer once. Returns their context,
    whose `join` raises what a rank has raised.
    """
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = (count, machines, free_port(), dict(os.environ), work, *args)
    return torch.multiprocessing.start_processes(
        _start, arguments, nprocs=count, join=False, daemon=True, start_method="forkserver"
    )


def on_ranks(count, work, *args, machines=1):
    """Run `work` on ranks, as if on several machines; raise here what one of them raises."""
    ranks = start_ranks(count, work, *args, machines=machines)
    while not ranks.join():
        pass


def on_two_ranks(work, *args):
    """As `on_ranks`, with two of them."""
    on_ranks(2, work, *args)


def train_traced(*arguments):
    """Train with compiled layers, without generated code, which takes minutes to build on a CPU.

    Nothing is compiled but the two halves of a layer, once: not for the pass that rebuilds DDP's
    buckets, nor for validation.
    """
    from torch._dynamo.utils import counters

    from infini_model.model.kernels import compile as compiled
    from infini_model.training.train import train

    whole, compiled._compiled = torch.compile, functools.cache(compiled._compiled.__wrapped__)
    torch.compile = functools.partial(whole, backend="aot_eager")
    torch.compiler.reset()
    counters.clear()
    try:
        outcome = train(*arguments)
    finally:
        torch.compile = whole
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    return outcome


def cut_off(run_dir, step, copy=None):
    """Remove the checkpoints after `step` from a run, or from a copy of it; returns the folder."""
    if copy is not None:
        run_dir = shutil.copytree(run_dir, copy)
    for path in (run_dir / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return run_dir
