"""The kernels of the GPU tokenizer compile for GPUs, and keep what they compute in registers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip(
    "triton", reason="triton is not installed: CPU builds of torch bring none"
)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from infini_model.data.tokenizers.gpu import word_model  # noqa: E402
from infini_model.data.tokenizers.gpu.kernels import (  # noqa: E402
    bits,
    characters,
    ids,
    launch,
    merging,
    words,
)

TYPES = {
    "text": "*i64",
    "kinds": "*u8",
    "prefixes": "*u8",
    "blocks": "*u8",
    "pages": "*i16",
    "multiplier": "i64",
    **dict.fromkeys(("size", "last", "count"), "i32"),
    **dict.fromkeys(("table", "kept", "values", "pairs", "offsets", "firsts", "chunks"), "*i64"),
}
BYTES, WORDS = {"BYTES": launch.BYTES}, {"WORDS": launch.WORDS}
KERNELS = [
    (characters.classify, BYTES),
    *((characters.cut, BYTES | {"DIGITS": digits}) for digits in (0, 1, 3)),
    (bits.count_bits, BYTES),
    (bits.place_bits, BYTES),
    *((words.probe, WORDS | {"LISTED": listed}) for listed in (False, True)),
    *((kernel, WORDS) for kernel in (words.claim, words.fill, ids.count_ids, ids.emit)),
    *((merging.merge, {"LENGTH": n, "WORDS": word_model.SYMBOLS // n}) for n in word_model.SIZES),
]


def compiled(kernel, constants, capability):
    """The kernel as it is compiled for tensors that torch has allocated."""
    types = TYPES | dict.fromkeys(constants, "constexpr")
    if kernel in (characters.classify, merging.merge):
        types["text"] = "*u8"
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def stack_bytes(cubin, path):
    """Bytes of a thread's stack: what does not fit into its registers."""
    path.write_bytes(cubin)
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(program), "--dump-resource-usage", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", printed)[1])


@pytest.mark.story
@pytest.mark.parametrize("capability", [80, 90, 100], ids=["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("kernel", "constants"), KERNELS, ids=lambda each: str(each))
def test_kernels_compile_and_fit_the_registers(kernel, constants, capability, tmp_path):
    binary = compiled(kernel, constants, capability)
    assert binary.metadata.shared <= 48 << 10
    assert stack_bytes(binary.asm["cubin"], tmp_path / "cubin") <= 256
