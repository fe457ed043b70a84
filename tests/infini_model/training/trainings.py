"""Trainings of several processes: where they meet, and which live."""

import socket

import psutil


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def trainers(run_dir):
    """Every live process that has the run folder among its arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]
