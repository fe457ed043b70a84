"""Regions that `torch.compile` turns into a few fused kernels, in the passes that train.

A region is a method of a layer: norms, casts, rotation, residual and activation become one kernel
each, around the matrix products and the operators of this package, which stay as they are. All
layers share the code, so that it is compiled once. Passes without gradients run the method as it
is: validation gives the numbers that an evaluation gives, and no other shape is ever compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from infini_model.runtime.errors import ConfigError

Method = TypeVar("Method", bound=Callable[..., Any])


def region(method: Method) -> Method:
    """Decorate a method of a module to be compiled in its training passes, where it asks for that.

    The module has an attribute `compiled`, which may change. The region must compile without a
    graph break, and is compiled anew for each shape of its inputs.
    """

    @functools.wraps(method)
    def run(module: nn.Module, *inputs: Any) -> Any:
        if module.compiled and module.training and torch.is_grad_enabled():
            return _compiled(method, torch.are_deterministic_algorithms_enabled())(module, *inputs)
        return method(module, *inputs)

    return cast("Method", run)


@functools.cache
def _compiled(method: Callable[..., Any], deterministic: bool) -> Callable[..., Any]:
    import torch._dynamo

    # It would cut the regions at the borders of DDP's buckets. Layers are small enough: gradients
    # of one are reduced while those of the next are computed.
    torch._dynamo.config.optimize_ddp = False
    # Otherwise kernels are chosen by their measured speed, and with them the order of sums.
    options: dict[str, Any] | None = {"deterministic": True} if deterministic else None
    return torch.compile(method, fullgraph=True, dynamic=False, options=options)


def resolve_compile(setting: bool | None, device: torch.device) -> bool:
    """Resolve `launch.compile`: None is yes on CUDA, where the compiler has what it needs.

    Raises:
        ConfigError: It is asked for where it lacks something.
    """
    lacking = _lacking(device)
    if setting and lacking is not None:
        raise ConfigError(f"launch.compile: got true, but there is no {lacking}")
    return device.type == "cuda" and lacking is None if setting is None else setting


def _lacking(device: torch.device) -> str | None:
    """What `torch.compile` needs on `device` and does not find; None if nothing."""
    if device.type != "cuda":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"C++ compiler ({compiler})"
    if importlib.util.find_spec("triton") is None:
        return "triton"
    if c_compiler() is None:
        return "C compiler"
    return None if has_python_headers() else "Python.h"


def c_compiler() -> str | None:
    """The C compiler with which Triton builds its launcher, once per machine; None if missing."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), None)
    return compiler if compiler is not None and shutil.which(compiler) else None


def has_python_headers() -> bool:
    """Whether the launcher can include `Python.h`."""
    return Path(sysconfig.get_path("include"), "Python.h").is_file()
