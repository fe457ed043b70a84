"""What builds kernels on this machine, and what installs it where it is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple


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
