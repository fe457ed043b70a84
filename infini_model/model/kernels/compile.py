"""Regions that `torch.compile` turns into a few fused kernels, in the passes that train.

A region is a method of a layer: norms, casts, rotation, residual and activation become one kernel
each, around the matrix products and this package's kernels on CUDA, which stay as they are. All
layers share the code, so that it is compiled once. Passes without gradients run the method as it
is: validation gives the numbers that an evaluation gives, and no other shape is ever compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from infini_model.runtime.errors import ConfigError
from infini_model.runtime.machine import lacking_on_cpu, lacking_on_gpu

Method = TypeVar("Method", bound=Callable[..., Any])


def compile_in_training(method: Method) -> Method:
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
    # `packing.context_schedule` may have more lengths than the default of 8.
    torch._dynamo.config.recompile_limit = 64
    # Otherwise kernels are chosen by their measured speed, and with them the order of sums.
    options: dict[str, Any] | None = {"deterministic": True} if deterministic else None
    return torch.compile(method, fullgraph=True, dynamic=False, options=options)


def resolve_compile(setting: bool | None, device: torch.device) -> bool:
    """Resolve `launch.compile`: None is yes on CUDA, where the compiler has what it needs.

    Raises `ConfigError` if it is asked for where it lacks something.
    """
    lack = lacking_on_gpu() if device.type == "cuda" else lacking_on_cpu()
    if setting and lack is not None:
        raise ConfigError(f"launch.compile: got true, but there is no {lack.what}: {lack.remedy}")
    return device.type == "cuda" and lack is None if setting is None else setting
