"""Run by `benchmarks.incremental`: the stages download, plan and, unless all stands, shard.

The arguments are a configuration file and `in-one-process` or `as-a-flow`, which gives each stage a
process of its own as the preprocess flow does. Prints one line of JSON: the fields of `Ran`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from benchmarks.usage import cpu_seconds, read_bytes
from infini_model.__main__ import OBJECTS_BETWEEN_COLLECTIONS, STAGES
from infini_model.config import Config, load_config
from infini_model.runtime.stage_protocol import RESULT, parse_line


class Ran(NamedTuple):
    """What the stages did: partitions made and reused, time, and bytes of text and shards read.

    The bytes are those that were read from files (Linux; else None) less the JSON records among
    them, imports excluded: a few KB may be others.
    """

    made: int
    reused: int
    seconds: float
    cpu_seconds: float
    content_bytes: int | None


class ContentReads:
    """Counts the bytes that this process reads, but for records."""

    def __init__(self) -> None:
        self._records = 0
        sys.addaudithook(self._on_event)
        self._before = read_bytes()

    def count(self) -> int | None:
        """The bytes so far."""
        now = read_bytes()
        if now is None or self._before is None:
            return None
        return max(0, now - self._before - self._records)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith((".json", ".py", ".pyc")):
            reads = (arguments[2] & os.O_ACCMODE) == os.O_RDONLY
            if reads and os.path.exists(arguments[0]):  # noqa: PTH110
                self._records += os.stat(arguments[0]).st_size  # noqa: PTH116


RunStage = Callable[[str, Path, Config, str | None], dict[str, Any]]


def in_one_process(stage: str, _file: Path, config: Config, listing: str | None) -> dict[str, Any]:
    """Run a stage here."""
    arguments = argparse.Namespace(listing=None if listing is None else Path(listing))
    return STAGES[stage](config, arguments)


def as_a_flow(stage: str, file: Path, _config: Config, listing: str | None) -> dict[str, Any]:
    """Run a stage in a process of its own."""
    command = [sys.executable, "-m", "infini_model", stage, "--config", str(file)]
    command += [] if listing is None else ["--listing", listing]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    messages = filter(None, map(parse_line, printed.splitlines()))
    result: dict[str, Any] = next(each.body for each in messages if each.mark == RESULT)
    return result


def run_stages(run_stage: RunStage, file: Path) -> Ran:
    """Run the stages one after another, as the preprocess flow does."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    config = load_config(file=file)
    _import_stages()
    reads = ContentReads()
    began, cpu_began = time.perf_counter(), cpu_seconds()
    listing = run_stage("download", file, config, None)["listing"]
    plan = run_stage("plan", file, config, listing)
    if not plan["intact"]:
        run_stage("shard", file, config, listing)
    seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu_began
    counted = None if run_stage is as_a_flow else reads.count()
    return Ran(plan["new"], plan["reused"], seconds, cpu, counted)


def _import_stages() -> None:
    """Import what the stages would, so that no time of theirs is spent on it."""
    for name in ("data.sources.download", "data.shards.plan"):
        importlib.import_module(f"infini_model.{name}")
    importlib.import_module("pyarrow.parquet")
    # Arrow imports pandas, where that is installed, for the first array.
    pa.array([0])


def main(file: str, how: str) -> None:
    """Run the stages and print what they did."""
    run_stage = {"in-one-process": in_one_process, "as-a-flow": as_a_flow}[how]
    print(json.dumps(run_stages(run_stage, Path(file))._asdict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
