"""Tokens per second of `infini_model.training`, compared with a plain PyTorch loop.

Each runs as a separate process, in turns. `training` is the training as users run it: loader,
schedule, checks, `metrics.jsonl`, TensorBoard, MLflow, and one checkpoint among the timed steps;
`plain loop` takes the same steps on one batch and does nothing else. Timing excludes the validation
at either end and the first steps, during which MLflow is imported and connected. Then the same
training runs with one thread per process, in one process and in several.

- MFU: relative to the GPU's peak; on a CPU, to the matrix product rate that PyTorch reaches with
  the same threads in the same turn.
- Checkpoint stall: how long a checkpoint pauses the training, relative to a step and to the steps
  between two checkpoints.
- Checks: the cost of checking for non-finite values and loss spikes, on top of the norm that
  clipping needs and the loss that is logged.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.report import Cell, Ratio, publish, run, speed_ratio, spread, take_turns
from flows.presets import configure
from infini_model.config import Config, dump_config
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.flops import flops_per_token, peak_flops
from infini_model.training.callbacks.spikes import SpikeDetector

PRESET = "quickstart"
OURS, PLAIN = "training", "plain loop"
ONE = "1 process of 1 thread"
CHECKS, CHECKPOINTS, ONE_STEP = "checks", "steps between checkpoints", "step with a checkpoint"
TARGETS = {PLAIN: 0.97, CHECKS: 0.99, CHECKPOINTS: 0.99, ONE_STEP: 0.99}
MEBIBYTE = 1 << 20
# Size and number of the matrix products that measure a CPU's peak.
SIDE, PRODUCTS = 1024, 8
CHECKED = 1000


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps per process")
    parser.add_argument("--skip", type=int, default=12, help="untimed steps before them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="processes in the last row")
    parser.add_argument(
        "overrides", nargs="*", help="overrides of the quickstart, as model.hidden_size=256"
    )
    return parser.parse_args()


def settings(folder: Path, options: argparse.Namespace) -> Config:
    """The quickstart, with validation only at start and end and a checkpoint half-way."""
    steps = options.skip + options.steps
    half_way = options.skip + options.steps // 2
    return configure(
        [PRESET],
        overrides=[
            {"run": {"output_dir": str(folder)}},
            {"model": {"vocab_size": 256}},
            {"data": {"source": {"paths": ["{stdlib}/*.py"]}}},
            {"training": {"max_steps": steps}},
            {"logging": {"eval_steps": steps + 1}, "evaluation": {"max_windows": 8}},
            {"checkpoint": {"save_steps": half_way}},
            *options.overrides,
        ],
    )


class Timing(NamedTuple):
    """Measurements of the timed steps of a training, from its metrics."""

    seconds: float
    wait_seconds: float
    stall_seconds: float
    peak_bytes: int


class Measured:
    """Runs the peers and keeps their timings."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.config = settings(folder, options)
        self._options = options
        self._file = folder / "config.yaml"
        self._file.write_text(dump_config(self.config), encoding="utf-8")
        corpus = download(self.config.data, folder)
        build_dataset(corpus, self.config.data, folder)
        self.many = f"{options.processes} processes of 1 thread each"
        names = (OURS, PLAIN, ONE, self.many)
        self.timings: dict[str, list[Timing]] = {name: [] for name in names}
        self.rates: list[float] = []
        self.check_seconds = check_seconds()

    def peers(self) -> dict[str, Callable[[], float]]:
        """The peers for `take_turns`; each returns the seconds of the timed steps."""
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={self._options.processes}"]
        peers = {
            OURS: lambda: self._training(OURS, []),
            PLAIN: self._plain_loop,
            ONE: lambda: self._training(ONE, [], threads=1),
            self.many: lambda: self._training(self.many, torchrun, threads=1),
        }
        if torch.cuda.is_available() and torch.cuda.device_count() < self._options.processes:
            del peers[self.many]
        return peers

    def _training(self, name: str, launcher: list[str], threads: int | None = None) -> float:
        self.rates += [peak_rate()] if name == OURS else []
        run_dir = self.config.run.runs_dir / f"{name} {len(self.timings[name])}"
        datasets = self.config.run.datasets_dir / "latest"
        arguments = ["--config", self._file, "--dataset", datasets, "--run-dir", run_dir]
        ended = run([*launcher, "-m", "infini_model.training", *map(str, arguments)], threads)
        steps = [line for line in read_metrics(run_dir) if "train/loss" in line]
        timed = steps[self._options.skip :]
        timing = Timing(
            seconds=timed[-1]["time"] - steps[self._options.skip - 1]["time"],
            wait_seconds=sum(line["train/data_wait_seconds"] for line in timed),
            stall_seconds=sum(line.get("checkpoint/stall_seconds", 0.0) for line in timed),
            peak_bytes=ended.peak_bytes,
        )
        self.timings[name].append(timing)
        return timing.seconds

    def _plain_loop(self) -> float:
        ended = run(["-m", "benchmarks.plain_loop", str(self._file), str(self._options.steps)])
        seconds = float(json.loads(ended.last_line)["seconds"])
        self.timings[PLAIN].append(Timing(seconds, 0.0, 0.0, ended.peak_bytes))
        return seconds


def peak_rate() -> float:
    """The device's peak FLOP/s: the GPU's data sheet value, or measured."""
    device, dtype = "cpu", torch.float32
    if torch.cuda.is_available():
        if known := peak_flops(torch.cuda.get_device_name()):
            return known
        device, dtype = "cuda", torch.bfloat16
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    (left @ right).sum().item()
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            product = left @ right
        product[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * SIDE**3 * PRODUCTS / best


def check_seconds() -> float:
    """Seconds that the checks of one step take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    norm, spikes = torch.ones((), device=device), SpikeDetector()
    began = time.perf_counter()
    for step in range(CHECKED):
        loss = 2.0 + step % 7 / 100
        assert math.isfinite(loss)
        assert math.isfinite(norm.item())
        assert spikes.watch(loss) is None
    return (time.perf_counter() - began) / CHECKED


def row(measured: Measured, name: str, options: argparse.Namespace) -> dict[str, Cell]:
    """A table row: the medians over the turns."""
    config, timings = measured.config, measured.timings[name]
    if not timings:
        return {"": name, "tokens/s": None, **dict.fromkeys(COLUMNS)}
    processes = options.processes if name == measured.many else 1
    tokens = processes * config.training.batch_size * config.packing.context_length
    seconds = statistics.median(each.seconds for each in timings) / options.steps
    model = InfiniLlama(config.model)
    flops = flops_per_token(model, config.packing.context_length) * tokens
    waited = statistics.median(each.wait_seconds / each.seconds for each in timings)
    stalled = statistics.median(each.stall_seconds for each in timings)
    ours = name != PLAIN
    return {
        "": name,
        "tokens/s": tokens / seconds,
        "ms a step": 1e3 * seconds,
        "MFU": flops / seconds / max(measured.rates) if name in (OURS, PLAIN) else None,
        "checks": f"{100 * measured.check_seconds / seconds:.3f}%" if name == OURS else None,
        "data wait": f"{100 * waited:.2f}%" if ours else None,
        "checkpoint ms": 1e3 * stalled if ours else None,
        "peak MiB": max(each.peak_bytes for each in timings) // MEBIBYTE,
    }


COLUMNS = ("ms a step", "MFU", "checks", "data wait", "checkpoint ms", "peak MiB")


def ratios_of(
    measured: Measured, seconds: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, Ratio]:
    """Speed ratios, each relative to the same training without the measured overhead."""
    between = configure([PRESET]).checkpoint.save_steps
    steps = [(each.seconds / options.steps, each.stall_seconds) for each in measured.timings[OURS]]
    found = {
        PLAIN: speed_ratio(seconds[OURS], seconds[PLAIN]),
        CHECKS: spread([step / (step + measured.check_seconds) for step, _ in steps]),
        CHECKPOINTS: spread([between * step / (between * step + stall) for step, stall in steps]),
        ONE_STEP: spread([step / (step + stall) for step, stall in steps]),
    }
    if measured.many in seconds:
        found[measured.many] = speed_ratio(seconds[measured.many], seconds[ONE])
    return found


def main() -> None:
    """Measure in turns and print the results."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), options)
        seconds = take_turns(measured.peers(), options.turns)
    config = measured.config
    tokens = config.training.batch_size * config.packing.context_length
    source = "its peak" if torch.cuda.is_available() else "matrix products in the same run"
    publish(
        "train_step",
        f"Training the {PRESET}, {options.steps} steps of {tokens} tokens per process; "
        f"MFU relative to {max(measured.rates) / 1e9:,.0f} GFLOP/s ({source})",
        [row(measured, name, options) for name in measured.timings],
        ratios_of(measured, seconds, options),
        TARGETS,
    )


if __name__ == "__main__":
    main()
