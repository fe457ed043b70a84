"""What this process has used so far. Imports little, for processes that are measured themselves."""

from __future__ import annotations

import resource
from pathlib import Path

IO = Path("/proc/self/io")


def cpu_seconds() -> float:
    """CPU time of this process, all its threads, and its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def read_bytes() -> int | None:
    """The bytes read from files, the page cache included (Linux; None elsewhere)."""
    if not IO.exists():
        return None
    lines = dict(line.split(": ") for line in IO.read_text().splitlines())
    return int(lines["rchar"])
