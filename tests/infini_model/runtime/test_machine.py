"""A container, a service or a batch job has what its control group leaves it of the machine."""

import os
from pathlib import Path

import pytest

from infini_model.runtime import machine
from infini_model.runtime.machine import available_cores, available_memory

CORES = len(os.sched_getaffinity(0))
# Of version 2, where the limit is of a group above; of version 1 in a container, whose groups are
# the roots there, whatever their names on the machine; and without limits.
NESTED = {
    "own": "0::/slice/job",
    "slice/cpu.max": "{quota} 100000",
    "slice/job/cpu.max": "max 100000",
    "slice/memory.max": "{limit}",
    "slice/memory.current": "700000",
    "slice/memory.stat": "anon 500000\ninactive_file 150000",
    "slice/job/memory.max": "max",
}
CONTAINER = {
    "own": "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/",
    "cpu/cpu.cfs_quota_us": "{quota}",
    "cpu/cpu.cfs_period_us": "100000",
    "memory/memory.limit_in_bytes": "{limit}",
    "memory/memory.usage_in_bytes": "700000",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 150000",
}


@pytest.fixture(params=[NESTED, CONTAINER], ids=["version 2", "version 1"])
def limits(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sets the quota of the control group in processor time, and its limit in bytes."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")

    def write(quota: str, limit: str) -> None:
        for name, text in request.param.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(quota=quota, limit=limit) + "\n")

    return write


def test_a_quota_and_a_limit_are_kept(limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, cores in (("150000", 2), ("20000", 1), ("6400000", 8)):
        limits(quota, "1000000")
        assert available_cores() == cores
        assert available_memory() == 450_000
    limits("100000", "100")
    assert available_memory() == 0


@pytest.mark.parametrize("unlimited", ["max", "-1"])
def test_without_a_limit_the_machine_is_all_there_is(unlimited: str, limits) -> None:
    limits(unlimited, str(1 << 62))
    assert available_cores() == CORES
    assert available_memory() > 1_000_000
