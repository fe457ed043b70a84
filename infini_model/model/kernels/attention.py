"""Exact softmax attention (arXiv 2404.07143, equations 2 and 3), by flash-attn or PyTorch."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from infini_model.config import AttentionBackend
from infini_model.runtime.errors import ConfigError

# The distributions of flash-attn, the faster one first.
_FLASH_ATTN = ("flash-attn-4", "flash-attn")


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel to use: `sdpa`, by which PyTorch chooses among its own, or one of `_FLASH_ATTN`.

    `backend` is one of `LaunchConfig.attention_backend`. FlashAttention takes 16 bits: where the
    computation is in float32, `flash` means `sdpa`. Each is deterministic in its backward pass if
    `torch.use_deterministic_algorithms` asks for it.

    Raises `ConfigError` if the backend is unknown, not installed, or does not support device or
    head.
    """
    got = f"launch.attention_backend: got {backend!r}"
    if backend not in get_args(AttentionBackend):
        raise ConfigError(f"{got}, takes {', '.join(get_args(AttentionBackend))}")
    if device.type != "cuda":
        if backend == "flash":
            raise ConfigError(f"{got}, which needs a GPU; on {device.type} it takes auto, sdpa")
        return "sdpa"
    if backend == "sdpa" or dtype not in (torch.float16, torch.bfloat16):
        return "sdpa"
    package = flash_attn_package(torch.cuda.get_device_capability(device), head_dim)
    if package is None and backend == "flash":
        got = "launch.attention_backend: got 'flash', but"
        if any(map(installed_version, _FLASH_ATTN)):
            raise ConfigError(f"{got} what is installed does not support this GPU and head_dim")
        raise ConfigError(
            f"{got} flash-attn is not installed: pip install 'infini-model[flash-attn]'"
        )
    return package or "sdpa"


# As `torch.compiler.assume_constant_result` does; that imports the compiler, which takes a second.
resolve_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def flash_attn_package(capability: tuple[int, int], head_dim: int) -> str | None:
    """The first of the installed distributions of flash-attn that suits a GPU and a head.

    flash-attn-4 needs Hopper or Blackwell, flash-attn (version 2) Ampere.
    """
    major, deterministic = capability[0], torch.are_deterministic_algorithms_enabled()
    suits = {
        # On compute capability 12 its backward pass is not deterministic.
        "flash-attn-4": 9 <= major <= (11 if deterministic else 12)
        and head_dim <= 128
        and head_dim % 8 == 0,
        "flash-attn": major >= 8 and head_dim <= 256,
    }
    return next((name for name in _FLASH_ATTN if suits[name] and installed_version(name)), None)


def describe_backend(kernel: str) -> str:
    """The description of a kernel from `resolve_backend`, for the log."""
    if kernel in _FLASH_ATTN:
        return f"{kernel} {installed_version(kernel)}"
    return f"PyTorch {torch.__version__}, chosen automatically"


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = "auto",
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Exact softmax attention, [N, H, L, D]; `backend` and errors are those of `resolve_backend`.

    Args:
        q: Queries [N, H, L, D].
        k: Keys [N, H_kv, M, D]; query head h reads key-value head h // (H / H_kv).
        v: Values [N, H_kv, M, D].
        backend: The kernel.
        mask: Bool, broadcast to [N, H, L, M], true where a query attends to a key. flash-attn takes
            none, and `sdpa` serves.
        causal: Without a mask, whether query i attends to keys 0 … i only; M must then be L.
    """
    kernel = resolve_backend(backend, q.device, q.dtype, q.size(3))
    if mask is None and kernel in _FLASH_ATTN:
        return _flash_attn(kernel, q, k, v, causal=causal)
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # Of PyTorch's kernels the memory-efficient one alone then computes no scores of all pairs
        # at once, and it takes no grouped heads.
        group = q.size(1) // k.size(1)
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    return functional.scaled_dot_product_attention(
        *(q, k, v),
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=q.size(1) != k.size(1),
    )


def _flash_attn(package: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention by the distribution `package`, which takes positions before heads."""
    if package == "flash-attn-4":
        from flash_attn.cute import flash_attn_func
    else:
        from flash_attn import flash_attn_func
    result: Any = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)
