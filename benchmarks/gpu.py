"""Test and measure on a GPU: `make gpu`.

Runs the tests that are marked `cuda`, a process per file, then short benchmarks beside their peers,
and writes a table of claim, target and measured into `docs/gpu.md`. A part that fails or takes too
long is a row, and the rest goes on; the exit status is then 1. A target that is missed is a result,
not a failure.

With `--rehearse` the same runs on a CPU, in tiny sizes and with Triton's interpreter, and the page
stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import Ratio, environment, verdicts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gpu.md"
LOGS = ROOT / "outputs" / "gpu"
RESULTS = "## Results\n"
# A broken GPU context spoils the tests of one file at most.
TESTS = ROOT / "tests" / "infini_model"
PART_SECONDS, TOTAL_SECONDS = 300.0, 1200.0
# Processes that share the tests of a file: most of the time is Triton's compiler, on one core.
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
# What the tests need beside the library.
NEEDED = ("pytest", "pytest_timeout", "xdist", "hypothesis", "triton")
REHEARSAL = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Options of `python -m benchmarks.NAME` on a GPU, and in a rehearsal.
BENCHMARKS = {
    "attention": (
        "--lengths 8192 32768 131072 --seconds 6",
        "--lengths 64 128 --segment 32 --heads 1 --head-dim 16 --full-limit 64 --turns 1",
    ),
    "generate": (
        "",
        "--hidden-size 64 --layers 1 --vocabulary 100 --segment 16 --prompt 20 --new-tokens 4 "
        "--turns 1",
    ),
    "tokenize": (
        "--device cuda --megabytes 400 --vocab-size 32768",
        "--device cpu --megabytes 0.3 --vocab-size 300 --turns 1",
    ),
    "train_step": (
        "--turns 2 tracking.mlflow=false tracking.tensorboard=false",
        "--steps 2 --skip 1 --turns 1 --processes 1 training.batch_size=1 "
        "packing.context_length=64 model.segment_length=32 model.num_hidden_layers=1 "
        "data.source.paths=['{stdlib}/json/*.py'] data.splits.validation=0 data.splits.train=1 "
        "data.splits.test=0 tracking.mlflow=false tracking.tensorboard=false",
    ),
}
# Lines shown of a part that failed; all of its output is in its log.
SHOWN_LINES = 40


class Row(NamedTuple):
    """A row of the table; `failed` is for a part that did not give what it should."""

    claim: str
    target: str
    measured: str
    failed: bool = False

    def __str__(self) -> str:
        measured = f"**failed**: {self.measured}" if self.failed else self.measured
        cells = (cell.replace("|", "\\|") for cell in (self.claim, self.target, measured))
        return f"| {' | '.join(cells)} |"


class Part(NamedTuple):
    """A program to run: of a file of tests, or of a benchmark, by their path in the repository."""

    path: str
    command: Sequence[str]


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes")
    parser.add_argument(
        "--output",
        type=Path,
        help="file for the page; by default docs/gpu.md, or none if rehearsed or with --only",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="parts whose path contains one of these"
    )
    options = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"{', '.join(missing)}: not installed for {sys.executable}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no GPU; make gpu REHEARSE=1 runs on the CPU")
    return options


def parts(*, rehearse: bool) -> Iterator[Part]:
    """The files with tests marked `cuda`, as `pytest -m cuda` collects them, and the benchmarks."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if re.search("mark.cuda|each_device", path.read_text(encoding="utf-8")):
            file = path.relative_to(ROOT).as_posix()
            pytest = (sys.executable, "-m", "pytest", "-n", f"{WORKERS}", "-m", "cuda")
            yield Part(file, (*pytest, "-rfE", "--tb=short", file))
    for name, options in BENCHMARKS.items():
        module = (sys.executable, "-m", f"benchmarks.{name}")
        yield Part(f"benchmarks/{name}.py", (*module, *options[rehearse].split()))


def run(part: Part, variables: Mapping[str, str], seconds: float) -> list[Row]:
    """Run a part for at most `seconds`; its output is kept in `LOGS`."""
    failed = Row(f"`{part.path}` runs", "exit status 0", "", failed=True)
    if seconds <= 0:
        return [failed._replace(measured=f"not run: the {TOTAL_SECONDS:.0f} s were over")]
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{part.path.replace('/', '.')}.log"
    with log.open("w", encoding="utf-8") as output:
        status = _status(part, variables, seconds, output.fileno())
    printed = log.read_text(encoding="utf-8", errors="replace")
    ended = f"stopped after {seconds:.0f} s" if status is None else f"exit status {status}"
    if part.path.startswith("tests/"):
        rows = [_row_of_tests(part.path, printed, ended, succeeded=status == 0)]
    else:
        summary = _summary(printed) if status == 0 else None
        rows = [*_rows_of_benchmark(summary)] if summary else [failed._replace(measured=ended)]
    if any(row.failed for row in rows):
        print("\n".join(printed.splitlines()[-SHOWN_LINES:]), flush=True)
    return rows


def _status(part: Part, variables: Mapping[str, str], seconds: float, output: int) -> int | None:
    """The exit status; None if it was killed, with its children, as it took too long."""
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _row_of_tests(file: str, printed: str, ended: str, *, succeeded: bool) -> Row:
    """What passed and, by name, what failed; a file of which nothing passed has failed."""
    source = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    title = (ast.get_docstring(source) or file).splitlines()[0]
    claim = f"`{Path(file).name}`: {title}"
    ends = re.findall(r"^.*\d+ \w+ in [\d.]+s.*$", printed, re.MULTILINE)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", ends[-1]) if ends else []
    if succeeded and any(count.endswith("passed") for count in counts):
        return Row(claim, "all pass", ", ".join(counts))
    broken = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", printed, re.MULTILINE)
    told = [", ".join([*counts, ended]), *(f"`{name}`" for name in broken)]
    return Row(claim, "all pass", "; ".join(told), failed=True)


def _summary(printed: str) -> dict[str, Any] | None:
    """The line of JSON with which a benchmark ends; None if there is none."""
    try:
        found = json.loads((printed.splitlines() or [""])[-1])
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and "ratios" in found else None


def _rows_of_benchmark(summary: dict[str, Any]) -> Iterator[Row]:
    """The ratios of a benchmark, and whether their targets are met."""
    for name, numbers in summary["ratios"].items():
        ratio, target, verdict = Ratio(**numbers), "–", ""
        bounds = summary["targets"].get(name), summary["limits"].get(name)
        for wanted, met in verdicts(ratio, *bounds):
            target, verdict = wanted, ": met" if met == "met" else ": **missed**"
        yield Row(f"`{summary['benchmark']}`: {name}", target, f"{ratio}{verdict}")


def table(rows: Sequence[Row]) -> str:
    """The table of the page."""
    head = ["| claim | target | measured |", "| --- | --- | --- |"]
    return "\n".join([*head, *map(str, rows), ""])


def about(device: str) -> str:
    """The machine and the versions of the results."""
    found = environment()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['machine']['cpu']}, {found['machine']['cores']} cores"
    cuda = f"CUDA {torch.version.cuda}, " if torch.version.cuda else ""
    return f"{device}; {machine}; {cuda}{versions}; commit {found['commit'] or 'unknown'}."


def main() -> int:
    """Run the parts in order and keep the page up to date; returns the exit status."""
    options = parse()
    device, page, variables = "No GPU: a rehearsal", options.output, REHEARSAL
    if not options.rehearse:
        gpu = torch.cuda.get_device_properties(0)
        device, variables = f"{gpu.name}, {gpu.total_memory >> 30} GiB", {}
        page = page or (None if options.only else PAGE)
    machine = about(device)
    ends, rows = time.monotonic() + TOTAL_SECONDS, []
    for part in parts(rehearse=options.rehearse):
        if options.only and not any(word in part.path for word in options.only):
            continue
        print(f"{part.path} …", flush=True)
        found = run(part, variables, min(PART_SECONDS, ends - time.monotonic()))
        rows += found
        print(table(found), flush=True)
        if page is not None:
            before = PAGE.read_text(encoding="utf-8").partition(RESULTS)[0]
            page.write_text(f"{before}{RESULTS}\n{machine}\n\n{table(rows)}", encoding="utf-8")
    failed = [row.claim for row in rows if row.failed]
    print("\n".join([f"{len(rows)} rows, {len(failed)} failed", *failed]))
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
