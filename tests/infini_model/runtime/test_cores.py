"""Available cores follow the CPU affinity of the process, if the platform has one."""

import os
import subprocess
import sys

import pytest

from infini_model.runtime.cores import available_cores


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_pinned_process_has_one_core() -> None:
    code = (
        "import os; from infini_model.runtime.cores import available_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(available_cores())"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert output.stdout.strip() == b"1"


@pytest.mark.parametrize(("count", "cores"), [(6, 6), (None, 1)])
def test_without_affinity_every_core_counts(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert available_cores() == cores
