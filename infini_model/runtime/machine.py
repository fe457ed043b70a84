"""What this machine has for a process: cores, main memory, packages, and what builds kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

# The control groups of a container, a service or a batch job, and which this process is in.
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cores() -> int:
    """Number of cores this process may be scheduled on, or that its quota is worth if less.

    Fewer than the machine has under `taskset`, a cpuset, a batch scheduler or a container's limit;
    where the platform has no affinity (macOS), all of them.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for group in _cgroups("cpu"):
        quota, _, period = _read(group / "cpu.max", group / "cpu.cfs_quota_us").partition(" ")
        if quota.isdecimal():  # otherwise "max" or -1
            period = period or _read(group / "cpu.cfs_period_us")
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def available_memory() -> int:
    """Bytes that are free or can be freed: of the machine, or of the container's limit if less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    for group in _cgroups("memory"):
        limit = _read(group / "memory.max", group / "memory.limit_in_bytes")
        used = _read(group / "memory.current", group / "memory.usage_in_bytes")
        held = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        cached = held.get("total_inactive_file") or held.get("inactive_file", "0")
        if limit.isdecimal():
            available = min(available, int(limit) - int(used) + int(cached))
    return max(0, available)


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of the control groups, of either version, that limit this process."""
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, own = line.split(":", 2)
        # Version 2 has one hierarchy, without a name.
        if controller in controllers.split(",") or not controllers:
            root = CGROUPS / controller if controllers else CGROUPS
            group = root / own.lstrip("/")
            # In a container the root is its own group, whatever that is called outside.
            yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _read(*files: Path) -> str:
    """The text of the first file that is there; empty without one."""
    return next((file.read_text().strip() for file in files if file.is_file()), "")


def package_versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of these packages; a checkout of this one is not installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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
