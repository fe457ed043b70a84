"""Tokens per second of `infini_model.training` beside a plain PyTorch loop of the same model.

Both are processes of their own, in turn. `training` is the training as a user gets it: loader,
schedule, checks, `metrics.jsonl`, TensorBoard and MLflow; `plain loop` takes the same steps on one
batch and does nothing else. Timed are the steps alone, without the validation and the checkpoint
at either end, and after the first ones, during which MLflow is being imported and connected.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import publish, run, speed_ratio, take_turns
from infini_model.config import Config, dump_config, load_config
from infini_model.data.shards import build_dataset
from infini_model.data.sources import download
from infini_model.training.metrics_file import read_metrics

OURS, PLAIN = "training", "plain loop"
MEBIBYTE = 1 << 20


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each process")
    parser.add_argument("--skip", type=int, default=20, help="steps before them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "overrides", nargs="*", help="changes of the quickstart, such as model.hidden_size=256"
    )
    return parser.parse_args()


def settings(folder: Path, options: argparse.Namespace) -> Config:
    """The quickstart, with validation and checkpoints at its ends alone."""
    steps = options.skip + options.steps
    never = steps + 1
    return load_config(
        "quickstart",
        overrides=[
            {"run": {"output_dir": str(folder)}},
            {"model": {"vocab_size": 256}},
            {"data": {"source": {"paths": ["{stdlib}/*.py"]}}},
            {"training": {"max_steps": steps, "eval_steps": never, "save_steps": never}},
            {"training": {"eval_batches": 1}},
            *options.overrides,
        ],
    )


class Measured:
    """Runs both peers and keeps what is told besides their seconds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.config = settings(folder, options)
        self._options = options
        self._file = folder / "config.yaml"
        self._file.write_text(dump_config(self.config), encoding="utf-8")
        corpus = download(self.config.data, folder)
        build_dataset(corpus, self.config.data, folder)
        self.peak_bytes: dict[str, list[int]] = {OURS: [], PLAIN: []}
        self.wait_shares: list[float] = []

    def peers(self) -> dict[str, Callable[[], float]]:
        """The two processes for `take_turns`; each measures the seconds of the timed steps."""
        return {OURS: self._training, PLAIN: self._plain_loop}

    def _training(self) -> float:
        folder = self.config.run.output_dir
        run_dir = folder / "runs" / str(len(self.wait_shares))
        datasets = self.config.run.datasets_dir / "latest"
        arguments = ["--config", self._file, "--dataset", datasets, "--run-dir", run_dir]
        ended = run(["-m", "infini_model.training", *map(str, arguments)])
        self.peak_bytes[OURS].append(ended.peak_bytes)
        steps = [line for line in read_metrics(run_dir) if "train/loss" in line]
        timed = steps[self._options.skip :]
        seconds = timed[-1]["time"] - steps[self._options.skip - 1]["time"]
        waited = sum(line["train/data_wait_seconds"] for line in timed)
        self.wait_shares.append(waited / seconds)
        return float(seconds)

    def _plain_loop(self) -> float:
        ended = run(["-m", "benchmarks.plain_loop", str(self._file), str(self._options.steps)])
        self.peak_bytes[PLAIN].append(ended.peak_bytes)
        return float(json.loads(ended.last_line)["seconds"])


def main() -> None:
    """Measure in turn and tell it."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder), options)
        seconds = take_turns(measured.peers(), options.turns)
    config = measured.config
    tokens = options.steps * config.training.batch_size * config.packing.context_length
    ratio = speed_ratio(seconds[OURS], seconds[PLAIN])
    wait = f"{100 * statistics.median(measured.wait_shares):.2f}%"
    rows = [
        {
            "": name,
            "tokens/s": tokens / statistics.median(seconds[name]),
            "ms a step": 1e3 * statistics.median(seconds[name]) / options.steps,
            "data wait": wait if name == OURS else "",
            "peak MiB": max(measured.peak_bytes[name]) // MEBIBYTE,
            "speed / plain loop": ratio if name == OURS else "",
        }
        for name in (OURS, PLAIN)
    ]
    heading = f"Training the quickstart, {options.steps} steps of {tokens // options.steps} tokens"
    publish("train_step", heading, rows, {PLAIN: ratio})


if __name__ == "__main__":
    main()
