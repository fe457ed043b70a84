"""Exact softmax attention inside segments (arXiv 2404.07143, equations 2 and 3).

On CUDA it runs flash-attn or one of PyTorch's kernels. On a CPU, PyTorch's kernel computes all
scores of a segment and masks the upper half; `tiled` skips that half, which takes a third off the
time at 512 tokens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from infini_model.model.kernels.tiled_attention import tiled_attention
from infini_model.model.rotary import Rope, rotate
from infini_model.runtime.errors import ConfigError

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CPU_BACKENDS = ("auto", "tiled", "flash", "math")
_CUDA_BACKENDS = ("auto", "flash_attn", *_KERNELS)


# For shorter segments, `tiled` saves less than its overhead.
_UNTILED_LENGTH = 128


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def resolve_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, length: int
) -> str:
    """The kernel to use for `backend`; `auto` means that PyTorch chooses among its own.

    Args:
        backend: One of `LaunchConfig.attention_backend`.
        device: Where the attention runs.
        dtype: Of queries, keys and values.
        head_dim: Width of a head.
        length: Tokens of a segment.

    Raises:
        ConfigError: The backend is unknown, not installed, or does not support the device or dtype.
    """
    takes = _CUDA_BACKENDS if device.type == "cuda" else _CPU_BACKENDS
    got = f"launch.attention_backend: got {backend!r}"
    if backend not in takes:
        raise ConfigError(f"{got}: on {device.type} it takes {', '.join(takes)}")
    if backend == "flash_attn" and _flash_attn_version() is None:
        raise ConfigError(f"{got}, but flash-attn is not installed (requirements-gpu.txt)")
    tileable = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    if backend == "tiled" and not tileable:
        raise ConfigError(f"{got}: it takes float32 or float64, not {dtype}")
    if backend != "auto":
        return backend
    if tileable and length > _UNTILED_LENGTH:
        return "tiled"
    if device.type == "cuda" and _flash_attn_serves(device, dtype, head_dim):
        return "flash_attn"
    return "auto"


@functools.cache
def _flash_attn_version() -> str | None:
    """The installed version of flash-attn, 4 if available, else 2; None if there is neither."""
    for distribution in ("flash-attn-4", "flash-attn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _flash_attn_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash-attn is installed and supports these: 4 from Hopper on, 2 from Ampere on."""
    version = _flash_attn_version()
    if version is None or dtype not in (torch.float16, torch.bfloat16):
        return False
    major, _ = torch.cuda.get_device_capability(device)
    if version.startswith("4"):
        return major >= 9 and head_dim <= 128
    return major >= 8 and head_dim <= 256


def describe_backend(kernel: str) -> str:
    """The description of a kernel from `resolve_backend`, for the log."""
    if kernel == "auto":
        return f"PyTorch {torch.__version__}, chosen automatically"
    if kernel == "flash_attn":
        return f"flash_attn {_flash_attn_version()}"
    return kernel


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rope: Rope | None = None,
    backend: str = "auto",
    mask: Tensor | None = None,
) -> Tensor:
    """Exact softmax attention, causal unless `mask` is given.

    Args:
        q: Queries [N, H, L, D].
        k: Keys [N, H_kv, M, D]; query head h reads key-value head h // (H / H_kv).
        v: Values [N, H_kv, M, D].
        rope: (cos, sin), each [L, D], to rotate queries and keys by; M must then be L.
        backend: Kernel; one of `LaunchConfig.attention_backend`.
        mask: Bool, broadcast to [N, H, L, M], true where a query attends to a key.

    Returns:
        [N, H, L, D].

    Raises:
        ConfigError: The backend is unknown, not installed, or does not support the device or dtype.
    """
    kernel = resolve_backend(backend, q.device, q.dtype, q.size(3), q.size(2))
    if mask is None and kernel == "tiled":
        out: Tensor = tiled_attention(q, k, v, *(rope or ()))
        return out
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    if mask is None and kernel == "flash_attn":
        return _flash_attn(q, k, v)
    # flash-attn, flash and tiled support no mask. Only generation passes one, and its queries are
    # few, so PyTorch may choose the kernel.
    any_kernel = kernel not in _KERNELS or (mask is not None and kernel == "flash")
    with contextlib.nullcontext() if any_kernel else sdpa_kernel(_KERNELS[kernel]):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
        )


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by the flash-attn package, which takes positions before heads."""
    if str(_flash_attn_version()).startswith("4"):
        from flash_attn.cute import flash_attn_func

        # Its deterministic backward pass is not available on every GPU.
        options = {}
    else:
        from flash_attn import flash_attn_func

        options = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    result: Any = flash_attn_func(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, **options
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)
