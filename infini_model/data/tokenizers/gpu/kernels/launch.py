"""How the kernels are launched, and how much a program of them does."""

from __future__ import annotations

from typing import Any

import torch
import triton

# Bytes of text, and words, of one program.
BYTES, WORDS = 1024, 256
# An odd number by which hashes are mixed; a positive int64, as kernels take their arguments.
MULTIPLIER = 0x1E3779B97F4A7C15


def programs(count: int, each: int) -> int:
    """How many programs do `count` items, `each` at a time."""
    number: int = triton.cdiv(count, each)
    return number


def launch(kernel: Any, grid: int, *arguments: Any, **constants: Any) -> None:
    """Run `grid` programs of a kernel on the device of its first argument; none if it is zero."""
    if not grid:
        return
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid,](*arguments, **constants)
