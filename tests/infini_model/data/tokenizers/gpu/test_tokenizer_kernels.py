"""The kernels of the GPU tokenizer compile for GPUs.

This file is a program, too, which compiles them: the interpreter, in which the tests of a machine
without a GPU run, compiles nothing.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infini_model.data.tokenizers.gpu import merges, pretokenize, words

NUMBERS = ("text", "table", "kept", "values", "pairs", "offsets", "firsts", "places")
TYPES = {
    **dict.fromkeys(NUMBERS, "*i64"),
    **dict.fromkeys(("kinds", "prefixes", "blocks", "candidates"), "*u8"),
    **dict.fromkeys(("size", "last", "count"), "i32"),
    "pages": "*i16",
    "multiplier": "i64",
}
BYTES, WORDS, LONGEST = {"BYTES": pretokenize.BYTES}, {"WORDS": words.WORDS}, max(merges.SIZES)
# Each kernel in the variant that needs most.
KERNELS = {
    pretokenize.classify: BYTES,
    pretokenize.cut: BYTES | {"DIGITS": 3},
    words.probe: WORDS | {"LISTED": True},
    merges.merge: {"LENGTH": LONGEST, "WORDS": merges.SYMBOLS // LONGEST},
    **dict.fromkeys((words.claim, words.emit), WORDS),
}
H100 = 90
OTHERS = [(merges.merge, 80), (merges.merge, 100)]


def compiled(kernel, capability):
    """The kernel as it is compiled for tensors that torch has allocated."""
    constants = KERNELS[kernel]
    types = TYPES | dict.fromkeys(constants, "constexpr")
    if kernel in (pretokenize.classify, merges.merge):
        types["text"] = "*u8"
    if kernel is pretokenize.cut:
        types["starts"] = "*u8"
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
    pointers = [at for at, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def test_kernels_compile_and_fit_the_shared_memory():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) == len(KERNELS) + len(OTHERS)
    for name, shared in found.items():
        assert shared <= 48 << 10, name


if __name__ == "__main__":
    measured = {}
    for kernel, capability in [*((kernel, H100) for kernel in KERNELS), *OTHERS]:
        binary = compiled(kernel, capability)
        measured[f"{kernel.__name__} for sm_{capability}"] = binary.metadata.shared
    print(json.dumps(measured))
