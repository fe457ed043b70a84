"""`metrics.jsonl`, the metrics of a run: one JSON object per line.

A line holds `step`, `time` (seconds since the epoch) and metrics under the names that MLflow shows.
When training resumes, the file is truncated to the step of the checkpoint, so that no step is
recorded twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from infini_model.runtime.storage import atomic_file, make_folder, named_os_errors

Line = dict[str, float]
# Size of a read from the end of the file.
TAIL_BYTES = 1 << 16
NOT_METRICS = ("step", "time")


def metrics_of(line: Line) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in line.items() if name not in NOT_METRICS)


def whole_lines(data: bytes) -> list[Line]:
    """Parsed lines of `data`; an unterminated last line, left by a killed writer, is skipped."""
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def read_metrics(run_dir: Path) -> list[Line]:
    """The lines of a run's `metrics.jsonl` in order; empty if there is no file."""
    try:
        return whole_lines((run_dir / "metrics.jsonl").read_bytes())
    except FileNotFoundError:
        return []


def newest_lines(run_dir: Path) -> Iterator[bytes]:
    """The whole lines of a run's `metrics.jsonl`, the newest first; none if there is no file.

    Reads from the end of the file, so that the time does not grow with the length of the run.
    """
    with contextlib.suppress(FileNotFoundError), (run_dir / "metrics.jsonl").open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin > 0:
            end, begin = begin, max(0, begin - TAIL_BYTES)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).splitlines(keepends=True)
            # The first line of a part may begin before it.
            rest = lines.pop(0) if begin > 0 else b""
            yield from (line for line in reversed(lines) if line.endswith(b"\n"))


def read_newest(run_dir: Path, *names: str) -> Line:
    """The latest recorded value of each of `names`; names never recorded are left out.

    Raises `ValueError` if a line is damaged.
    """
    found: Line = {}
    for line in newest_lines(run_dir):
        if missing := [n for n in names if n not in found and f'"{n}"'.encode() in line]:
            values = json.loads(line)
            found |= {name: values[name] for name in missing}
        if len(found) == len(names):
            break
    return found


def read_validation_losses(run_dir: Path) -> dict[int, float]:
    """Validation loss by step; lines without one are not parsed."""
    wanted = (line for line in newest_lines(run_dir) if b'"validation/loss"' in line)
    return {int(line["step"]): line["validation/loss"] for line in map(json.loads, wanted)}


class MetricsFile:
    """`metrics.jsonl`, open for appending.

    `resumed_step` is the step of the checkpoint that training resumes from: lines of later steps
    are removed. None starts an empty file.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        path = make_folder(run_dir) / "metrics.jsonl"
        kept = [
            line
            for line in read_metrics(run_dir)
            if resumed_step is not None and line["step"] <= resumed_step
        ]
        with atomic_file(path) as temporary:
            temporary.write_text("".join(map(_dumps, kept)), encoding="utf-8")
        self._path = path
        self._last_step = {name: line["step"] for line in kept for name in line}
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def has(self, step: int, name: str) -> bool:
        """Whether `name` was recorded at `step`, the current step of training."""
        return self._last_step.get(name) == step

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at `step`. Raises `UserError` if the disk is full."""
        line = {"step": step, "time": time.time(), **values}
        with named_os_errors(self._path):
            self._file.write(_dumps(line))
        self._last_step.update(dict.fromkeys(line, step))

    def sync(self) -> None:
        """Flush all lines to disk, so that a checkpoint is never ahead of them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _dumps(line: Mapping[str, float]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
