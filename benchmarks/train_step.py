"""Tokens per second of `infini_model.training`, compared with a plain PyTorch loop.

Each runs as a separate process, in turns. `training` is the training as users run it: loader,
schedule, checks, `metrics.jsonl`, TensorBoard, MLflow, and one checkpoint among the timed steps;
`plain loop` takes the same steps on one batch and does nothing else; `with a window` is the
training where each segment sees the one before it. Timing excludes the validation
at either end and the first steps, during which MLflow is imported and connected. Then the same
training runs with one thread per process, in one process and in several.

A checkpoint's stall is how long it pauses the training, relative to a step and to the steps between
two checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import Cell, Ratio, publish, run, speed_ratio, spread, take_turns
from flows.presets import configure
from infini_model.config import Config, dump_config, load_config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.optimizer import make_optimizer

PRESET = "quickstart"
OURS, PLAIN = "training", "plain loop"
WINDOWED = "with a window"
ONE = "1 process of 1 thread"
CHECKPOINTS, ONE_STEP = "steps between checkpoints", "step with a checkpoint"
TARGETS = {PLAIN: 0.97, WINDOWED: 0.87, CHECKPOINTS: 0.99, ONE_STEP: 0.99}
MEBIBYTE = 1 << 20
# Steps of the plain loop that exclude one-time compilation, autotuning and allocation.
WARM_UP = 3


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
    parser.add_argument("--plain", type=Path, metavar="FILE", help="only the loop of this config")
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
            {"model": {"vocab_size": 2048}},
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
        self._windowed = folder / "windowed.yaml"
        windowed = self.config.updated(model={"window_segments": 1})
        self._windowed.write_text(dump_config(windowed), encoding="utf-8")
        corpus = list_sources(self.config.data, folder)
        build_dataset(corpus, self.config.data, folder / "datasets")
        self.many = f"{options.processes} processes of 1 thread each"
        names = (OURS, PLAIN, WINDOWED, ONE, self.many)
        self.timings: dict[str, list[Timing]] = {name: [] for name in names}

    def peers(self) -> dict[str, Callable[[], float]]:
        """The peers for `take_turns`; each returns the seconds of the timed steps."""
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={self._options.processes}"]
        peers = {
            OURS: lambda: self._training(OURS, []),
            PLAIN: self._plain_loop,
            WINDOWED: lambda: self._training(WINDOWED, []),
            ONE: lambda: self._training(ONE, [], threads=1),
            self.many: lambda: self._training(self.many, torchrun, threads=1),
        }
        if torch.cuda.is_available() and torch.cuda.device_count() < self._options.processes:
            del peers[self.many]
        return peers

    def _training(self, name: str, launcher: list[str], threads: int | None = None) -> float:
        run_dir = self.config.run.runs_dir / f"{name} {len(self.timings[name])}"
        datasets = self.config.run.datasets_dir / "latest"
        file = self._windowed if name == WINDOWED else self._file
        arguments = ["--config", file, "--dataset", datasets, "--run-dir", run_dir]
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
        steps = str(self._options.steps)
        loop = ["-m", "benchmarks.train_step", "--plain", str(self._file), "--steps", steps]
        ended = run(loop)
        seconds = float(json.loads(ended.last_line))
        self.timings[PLAIN].append(Timing(seconds, 0.0, 0.0, ended.peak_bytes))
        return seconds


def plain_loop(config: Config, steps: int) -> float:
    """Seconds of the same steps in a plain loop: one batch, no schedule, metrics or checkpoints."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.run.seed)
    model = InfiniLlama(config.model).to(device)
    optimizer = make_optimizer(model, config.training)
    shape = (config.training.batch_size, config.packing.context_length + 1)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, device=device)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss synchronizes with the device at every step, as logging it would.
        loss.item()
    return time.perf_counter() - began


def row(measured: Measured, name: str, options: argparse.Namespace) -> dict[str, Cell]:
    """A table row: the medians over the turns."""
    config, timings = measured.config, measured.timings[name]
    processes = options.processes if name == measured.many else 1
    tokens = processes * config.training.batch_size * config.packing.context_length
    seconds = statistics.median(each.seconds for each in timings) / options.steps
    waited = statistics.median(each.wait_seconds / each.seconds for each in timings)
    stalled = statistics.median(each.stall_seconds for each in timings)
    ours = name != PLAIN
    return {
        "": name,
        "tokens/s": tokens / seconds,
        "ms a step": 1e3 * seconds,
        "data wait": f"{100 * waited:.2f}%" if ours else None,
        "checkpoint ms": 1e3 * stalled if ours else None,
        "peak MiB": max(each.peak_bytes for each in timings) // MEBIBYTE,
    }


def ratios_of(
    measured: Measured, seconds: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, Ratio]:
    """Speed ratios, each relative to the same training without the measured overhead."""
    between = configure([PRESET]).checkpoint.save_steps
    steps = [(each.seconds / options.steps, each.stall_seconds) for each in measured.timings[OURS]]
    found = {
        PLAIN: speed_ratio(seconds[OURS], seconds[PLAIN]),
        WINDOWED: speed_ratio(seconds[WINDOWED], seconds[OURS]),
        CHECKPOINTS: spread([between * step / (between * step + stall) for step, stall in steps]),
        ONE_STEP: spread([step / (step + stall) for step, stall in steps]),
    }
    if measured.many in seconds:
        found[measured.many] = speed_ratio(seconds[measured.many], seconds[ONE])
    return found


def main() -> None:
    """Measure in turns and print the results."""
    options = parse()
    if options.plain:
        print(plain_loop(load_config(file=options.plain), options.steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), options)
        seconds = take_turns(measured.peers(), options.turns)
    config = measured.config
    tokens = config.training.batch_size * config.packing.context_length
    publish(
        "train_step",
        f"Training the {PRESET}, {options.steps} steps of {tokens} tokens per process",
        [row(measured, name, options) for name in seconds],
        ratios_of(measured, seconds, options),
        TARGETS,
    )


if __name__ == "__main__":
    main()
