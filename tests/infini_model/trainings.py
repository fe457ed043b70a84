"""Trainings in processes of their own: starting them, and finding live ones."""

import os
from concurrent.futures import ProcessPoolExecutor

import torch
from ports import free_port

PRELOADED = ["infini_model.training.loop", "torch.distributed.fsdp"]


def trainers(run_dir):
    """Every live process with the run folder in its arguments."""
    import psutil

    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _start(rank, port, work, *args):
    """Run `work` as one of two ranks, as if started by torchrun."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(*args)


def on_two_ranks(work, *args):
    """Run `work` on two ranks in new processes: gloo may crash in a process's second group.

    The processes fork from a server that has imported torch and the trainer once.
    """
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = (free_port(), work, *args)
    torch.multiprocessing.start_processes(
        _start, args=arguments, nprocs=2, start_method="forkserver"
    )


def in_a_fork(work, *args):
    """Run `work` in a new process, forked as those of two ranks are; raise what it raises here."""
    torch.multiprocessing.set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(work, *args).result()
