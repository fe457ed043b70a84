"""Shared by the benchmarks: measuring peers in turns, a table, and one line of JSON.

The speed of a machine varies with its other load. So peers take turns, a ratio is computed within
each turn, and the median, minimum and maximum of the ratios are reported.

torch is imported where it is used: a process whose memory is measured may do without.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from infini_model.runtime.machine import available_cores

PACKAGES = (
    *("torch", "triton", "flash-attn-4", "flash-attn", "numpy", "pyarrow", "pydantic"),
    *("safetensors", "tokenizers", "gigatoken", "tiktoken", "datatrove", "datasets", "ray"),
    *("infini-transformer-pytorch", "prefect", "mlflow"),
)
# A time limit never cuts the turns below this: fewer would not show how much results vary.
MIN_TURNS = 3


class Ratio(NamedTuple):
    """Median and range of a figure over the turns, such as our speed relative to a peer's."""

    median: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


# None means not measured.
Cell: TypeAlias = str | int | float | Ratio | None


def take_turns(
    peers: Mapping[str, Callable[[], float]], turns: int, seconds: float = float("inf")
) -> dict[str, list[float]]:
    """Run the peers in turns, A B C A B C …, and collect what each measures.

    Ends after `turns` turns, or after at least `MIN_TURNS` once `seconds` have passed.
    """
    measured: dict[str, list[float]] = {name: [] for name in peers}
    deadline = time.monotonic() + seconds
    for turn in range(turns):
        if turn >= MIN_TURNS and time.monotonic() > deadline:
            break
        for name, measure in peers.items():
            measured[name].append(measure())
    return measured


def stopwatch(work: Callable[[], object]) -> Callable[[], float]:
    """A peer for `take_turns` that times `work`, synchronizing with the GPU at the end."""
    import torch

    def measure() -> float:
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return measure


def speed_ratio(ours: Sequence[float], peers: Sequence[float]) -> Ratio:
    """The speed ratio, from the seconds that the same work took in each turn."""
    return spread([peer / our for our, peer in zip(ours, peers, strict=True)])


def spread(ratios: Sequence[float]) -> Ratio:
    """The median and range of the turns' ratios."""
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def cpu_seconds() -> float:
    """CPU time of this process, all its threads, and its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


class Ended(NamedTuple):
    """What a process printed, and its peak memory in bytes."""

    printed: str
    peak_bytes: int

    @property
    def last_line(self) -> str:
        """The last line that it printed."""
        return (self.printed.splitlines() or [""])[-1]


def run(arguments: Sequence[str], threads: int | None = None) -> Ended:
    """Run a Python process to completion, with `threads` OpenMP threads per process.

    The memory is that of its largest process. Raises `SystemExit` with its output if it fails.
    """
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | limit,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} exited with {process.returncode}:\n{printed}")
    # Linux reports KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Ended(printed, used.ru_maxrss * unit)


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit of the results."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": available_cores(),
            "gpus": gpus,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
            "torch_threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    """The commit of this checkout, with `-dirty` if files are modified; None outside of git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        described = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def publish(
    benchmark: str,
    heading: str,
    rows: Sequence[Mapping[str, Cell]],
    ratios: Mapping[str, Ratio],
    targets: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Print the table, the ratios that have a target and, last, everything as one line of JSON.

    `rows` have the same columns; `ratios`, by peer, are the results of the benchmark; `targets` are
    minimum values and `limits` maximum values for the medians of some of them.
    """
    targets, limits = targets or {}, limits or {}
    about = environment()
    machine = about["machine"]
    print(f"\n{heading}")
    print(
        f"{machine['cpu']}, {machine['cores']} cores, {', '.join(machine['gpus']) or 'no GPU'}; "
        f"OMP_NUM_THREADS {machine['OMP_NUM_THREADS']}, {machine['torch_threads']} torch threads"
    )
    lines = [list(rows[0]), *([_shown(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        right = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]))
    for name, ratio in ratios.items():
        for wanted, met in verdicts(ratio, targets.get(name), limits.get(name)):
            print(f"{name}: {ratio}, {wanted}: {met}")
    summary = {
        "benchmark": benchmark,
        **about,
        "ratios": {peer: ratio._asdict() for peer, ratio in ratios.items()},
        "targets": dict(targets),
        "limits": dict(limits),
        "table": [{name: _plain(cell) for name, cell in row.items()} for row in rows],
    }
    print(json.dumps(summary, allow_nan=False), flush=True)


def verdicts(
    ratio: Ratio, least: float | None, most: float | None
) -> Iterator[tuple[str, Literal["met", "missed"]]]:
    """Each bound of a ratio in words, and whether its median keeps to it."""
    if least is not None:
        yield f"at least {least:.3g}", "met" if ratio.median >= least else "missed"
    if most is not None:
        yield f"at most {most:.3g}", "met" if ratio.median <= most else "missed"


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _plain(cell: Cell) -> Any:
    return cell._asdict() if isinstance(cell, Ratio) else cell
