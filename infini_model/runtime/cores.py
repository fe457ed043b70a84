"""The CPU cores that this process may use."""

import os


def available_cores() -> int:
    """Number of cores this process may be scheduled on.

    Fewer than the machine has under `taskset`, a cpuset or a batch scheduler; where the platform
    has no affinity (macOS), all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
