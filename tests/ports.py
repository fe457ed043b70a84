"""Ports for servers that a test starts."""

from __future__ import annotations

import contextlib
import os
import random
import socket

# A server may take half a minute from the choice of its port until it listens. Above the ports of
# Ray's workers and below those that the kernel gives to clients, only another test could take it:
# each of pytest's workers has ports of its own.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_PORTS = range(20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), 32_000, _WORKERS)
_chance = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """A loopback port that is free, and that this process has not given away before."""
    while True:
        port = _chance.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
