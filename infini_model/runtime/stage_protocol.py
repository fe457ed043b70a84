"""What a stage in a child process reports to its parent: one line of stdout a message.

`::progress [DONE, TOTAL]` while it works; then `::result {…}`, or `::error {"kind": …, "message":
…}`. Every other line is a log line.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

PROGRESS, RESULT, ERROR = "::progress", "::result", "::error"

OnProgress = Callable[[int, int], None]


def write_message(mark: str, body: Any) -> None:
    # A single write: other threads log to the same stream.
    sys.stdout.write(f"{mark} {json.dumps(body)}\n")
    sys.stdout.flush()


def write_progress(done: int, total: int) -> None:
    """Report that `done` of `total` units of work are done."""
    write_message(PROGRESS, [done, total])


def parse_line(line: str) -> tuple[str, Any]:
    """The mark and the body of the message in a line of a stage's output; "" and None of others."""
    mark, _, body = line.partition(" ")
    if mark in (PROGRESS, RESULT, ERROR):
        with contextlib.suppress(ValueError):
            return mark, json.loads(body)
    return "", None


def rate_limited(report: OnProgress, *, interval_seconds: float = 0.5) -> OnProgress:
    """`report`, called at most once per interval, and always when the work is complete."""
    last = -math.inf

    def limited(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= interval_seconds:
            last = now
            report(done, total)

    return limited
