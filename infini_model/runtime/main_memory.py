"""The main memory that this process and its children may still use."""

from __future__ import annotations

from pathlib import Path

# The control group (version 2) of a container, such as a Kubernetes pod with a memory limit.
CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that are free or can be freed: of the machine, or of the container's limit if less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = _left_in_container()
    return available if left is None else max(0, min(available, left))


def _left_in_container() -> int | None:
    """Bytes below the limit of the container; None if there is no limit."""
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return None
    statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    cached = int(statistics.get("inactive_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + cached
