"""Triton's interpreter, which runs kernels on the CPU, mended and made faster."""

from __future__ import annotations

from typing import Any

import pytest


def mend(patch: pytest.MonkeyPatch) -> None:
    """Mend the interpreter for as long as `patch` lasts."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        # It multiplies the raw bits of bfloat16; convert to float32 first.
        a, b = (self.create_fp_ext(x, float32) if x.dtype == bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *others)

    def patch_once(function: Any) -> Any:
        # Triton's modules are patched once a launch and function, not in each call.
        if function in patched:
            return None
        patched.add(function)
        return patch_lang(function)

    def launch_anew(*arguments: Any, **keywords: Any) -> Any:
        patched.clear()
        return launch(*arguments, **keywords)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(interpreter, "_patch_lang", patch_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
