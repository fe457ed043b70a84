"""What this machine has for a process: cores, main memory, and what builds kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

# The control group (version 2) of a container, such as a Kubernetes pod with a memory limit.
CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Number of cores this process may be scheduled on.

    Fewer than the machine has under `taskset`, a cpuset or a batch scheduler; where the platform
    has no affinity (macOS), all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that are free or can be freed: of the machine, or of the container's limit if less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = _left_in_container()
    return available if left is None else max(0, min(available, left))


def _left_in_container() -> int | None:
    """Bytes below the limit of the container; None if there is no limit."""
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return None
    statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    cached = int(statistics.get("inactive_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + cached


class Lack(NamedTuple):
    """What is not installed, and what installs it."""

    what: str
    remedy: str


def lacking_on_gpu() -> Lack | None:
    """What Triton lacks to build kernels, and the launcher that calls them; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return Lack("triton", "install torch with CUDA: pip install --force-reinstall torch")
    if c_compiler() is None:
        return Lack("C compiler", "apt-get install gcc libc6-dev, or set CC")
    # As Triton does: the scheme of Debian's own Python names a folder without headers.
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").is_file():
        package = f"python{sysconfig.get_python_version()}-dev"
        return Lack("Python.h", f"apt-get install {package}, or use a Python that has its headers")
    return None


def lacking_on_cpu() -> Lack | None:
    """What `torch.compile` lacks on a CPU; None if nothing."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return None
    return Lack(f"C++ compiler ({compiler})", "apt-get install g++, or set CXX")


def c_compiler() -> str | None:
    """The C compiler with which Triton builds its launcher, once per machine; None if missing."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    return compiler if compiler is not None and shutil.which(compiler) else None
