"""Each benchmark runs, at a size that measures nothing, and ends with a line of JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import Ratio, speed_ratio, take_turns

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "attention": ["--lengths", "64", "--segment", "32", "--heads", "1", "--turns", "1"],
    "train_step": [
        *("--steps", "2", "--skip", "1", "--turns", "1", "training.batch_size=1"),
        *("packing.context_length=64", "model.segment_length=32", "model.num_hidden_layers=1"),
        *("data.source.paths=['{stdlib}/json/*.py']", "data.splits.validation=0"),
        *("data.splits.train=1", "data.splits.test=0"),
        *("tracking.mlflow=false", "tracking.tensorboard=false"),
    ],
    "tokenize": ["--megabytes", "0.3", "--vocab-size", "300", "--workers", "1", "--turns", "1"],
    "loader": ["--megabytes", "0.3", "--seconds", "0.01", "--turns", "1"],
}


@pytest.mark.parametrize("name", TINY)
def test_it_ends_with_a_line_of_json(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *TINY[name]]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["benchmark"] == name
    assert told["machine"]["cores"] > 0
    assert "torch" in told["versions"]
    assert told["table"]
    assert told["ratios"]
    for ratio in told["ratios"].values():
        for number in (ratio["lowest"], ratio["median"], ratio["highest"]):
            assert math.isfinite(number)
            assert number > 0


def test_make_bench_runs_every_one_of_them() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    names = next(line for line in lines if line.startswith("BENCHMARKS")).partition("=")[2]
    assert set(names.split()) == set(TINY)


def test_peers_take_turns_and_stop_when_the_time_is_over() -> None:
    order: list[str] = []

    def peer(name: str) -> float:
        order.append(name)
        return 1.0

    peers = {"a": lambda: peer("a"), "b": lambda: peer("b")}
    assert take_turns(peers, turns=2) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["a", "b", "a", "b"]
    assert len(take_turns(peers, turns=100, seconds=0.0)["a"]) == 3


def test_a_ratio_is_formed_within_each_turn() -> None:
    # The machine is half as fast in the second turn, and ours is twice as fast in all of them.
    assert speed_ratio([1.0, 2.0, 1.5], [2.0, 4.0, 3.0]) == Ratio(2.0, 2.0, 2.0)
