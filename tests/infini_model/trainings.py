"""Multi-process trainings: starting ranks, and finding live ones."""

import os
import socket

import torch

PRELOADED = ["infini_model.training.loop", "torch.distributed.fsdp"]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


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
    arguments = (*free_ports(1), work, *args)
    torch.multiprocessing.start_processes(
        _start, args=arguments, nprocs=2, start_method="forkserver"
    )
