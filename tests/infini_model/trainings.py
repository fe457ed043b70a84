"""Trainings in processes of their own: starting them, and finding live ones."""

import os
from concurrent.futures import ProcessPoolExecutor

import torch
from ports import free_port

# The last three are imported late, by torch.optim, pyarrow and the banner: two seconds a rank.
PRELOADED = [
    *("infini_model.training.loop", "torch.distributed.fsdp", "torch._dynamo", "pandas", "psutil"),
]


def trainers(run_dir):
    """Every live process with the run folder in its arguments."""
    import psutil

    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _start(rank, count, port, work, *args):
    """Run `work` as one of `count` ranks, as if started by torchrun."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(*args)


def start_ranks(count, work, *args):
    """Start `work` on `count` ranks in new processes; returns the processes.

    They fork from a server that has imported torch and the trainer once.
    """
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    context, port = torch.multiprocessing.get_context("forkserver"), free_port()
    ranks = [
        context.Process(target=_start, args=(rank, count, port, work, *args), daemon=True)
        for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def on_two_ranks(work, *args):
    """Run `work` on two ranks in new processes: gloo may crash in a process's second group."""
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = (2, free_port(), work, *args)
    torch.multiprocessing.start_processes(
        _start, args=arguments, nprocs=2, start_method="forkserver"
    )


def in_a_fork(work, *args):
    """Run `work` in a new process, forked as those of two ranks are; raise what it raises here."""
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(work, *args).result()
