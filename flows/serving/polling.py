"""Waiting for something that another process does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def poll(
    condition: Callable[[], bool], *, every_seconds: float, timeout_seconds: float = math.inf
) -> bool:
    """Block until `condition` is true; return False if it still is not after the timeout.

    The condition is checked at least once, and then every `every_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_seconds)
    return True
