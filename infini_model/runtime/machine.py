"""What this machine has for a process: cores, main memory, and what builds kernels."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The control groups of a container, a service or a batch job, and those of this process.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> int:
    """Number of cores this process may be scheduled on, or of those that its quota is worth.

    Fewer than the machine has under `taskset`, a cpuset, a batch scheduler or a container's limit;
    where the platform has no affinity (macOS), all of them.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for group in _cgroups("cpu"):
        quota, period = _read(group, "cpu.max", "max max").split()
        quota = _read(group, "cpu.cfs_quota_us", quota)
        if quota not in ("max", "-1"):
            cores = min(
                cores, math.ceil(int(quota) / int(_read(group, "cpu.cfs_period_us", period)))
            )
    return max(1, cores)


def available_memory() -> int:
    """Bytes that are free or can be freed: of the machine, or of the container's limit if less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for group in _cgroups("memory"):
        limit = _read(group, "memory.max", _read(group, "memory.limit_in_bytes", "max"))
        used = _read(group, "memory.current", _read(group, "memory.usage_in_bytes", "0"))
        statistics = dict(line.split() for line in _read(group, "memory.stat", "").splitlines())
        # Those of version 1 are of the group alone, with its total beside.
        cached = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        if limit != "max":
            available = min(available, int(limit) - int(used) + int(cached))
    return max(0, available)


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of the control groups, of version 1 or 2, that limit this process."""
    for line in _read(OWN_CGROUPS.parent, OWN_CGROUPS.name, "").splitlines():
        _, controllers, own = line.split(":", 2)
        # Version 2 has one hierarchy, which is not named; version 1 has one for each controller.
        if controller in controllers.split(",") or not controllers:
            root = CGROUPS / controller if controllers else CGROUPS
            group = root / own.lstrip("/")
            # In a container the root is its own group, whatever the name on the machine.
            yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _read(folder: Path, name: str, otherwise: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8").strip()
    except OSError:
        return otherwise


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
