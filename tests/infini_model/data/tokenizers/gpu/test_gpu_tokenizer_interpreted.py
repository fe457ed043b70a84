"""Without a GPU, Triton's interpreter runs the tests of the GPU tokenizer in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and another test may have imported it already.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

HERE = Path(__file__).parent
DATA = HERE.parents[1]
WITH_DATA = "test_windows_of_a_gpu_tokenizer_match_those_of_the_dataset"
TESTS = (
    str(HERE / "test_pretokens.py"),
    str(HERE / "test_device_tokenizer.py"),
    f"{DATA}/loading/test_gpu_dataloader.py::{WITH_DATA}",
    f"{DATA}/shards/test_workers.py::test_shards_do_not_depend_on_the_device",
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# The longest of all tests: forty seconds on a fast machine.
@pytest.mark.story
@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="the tests run themselves")
def test_interpreted():
    """The larger trials take too long here: `make fuzz`."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", *TESTS],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
