"""Each benchmark runs, at a tiny size, and ends with a line of JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from benchmarks import attention
from benchmarks.report import Ratio, publish, speed_ratio, take_turns
from benchmarks.utilization import Shape, Training, utilization

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "attention": [
        *("--lengths", "64", "128", "--segment", "32", "--heads", "1", "--head-dim", "16"),
        *("--full-limit", "64", "--turns", "1"),
    ],
    "model": [
        *("--lengths", "32", "64", "--prompts", "20", "40", "--segment", "16", "--turns", "1"),
        *("--hidden-size", "64", "--layers", "1"),
    ],
    "train_step": [
        *("--steps", "2", "--skip", "1", "--turns", "1", "--processes", "1"),
        "training.batch_size=1",
        *("packing.context_length=64", "model.segment_length=32", "model.num_hidden_layers=1"),
        *("data.source.paths=['{stdlib}/json/*.py']", "data.splits.validation=0"),
        *("data.splits.train=1", "data.splits.test=0"),
        *("tracking.mlflow=false", "tracking.tensorboard=false"),
    ],
    "tokenize": ["--megabytes", "0.3", "--vocab-size", "300", "--turns", "1"],
    "tokenize_device": ["--megabytes", "0.3", "--vocab-size", "300", "--turns", "1"],
    "loader": ["--megabytes", "0.3", "--seconds", "0.01", "--turns", "1"],
}


# These take the longest.
LONG = ("tokenize", "model")
# Packages missing on a machine with only torch, numpy, pyarrow, pydantic and safetensors.
ABSENT = (
    *("datasets", "gigatoken", "infini_transformer_pytorch", "mlflow", "prefect", "tokenizers"),
    *("transformers", "yaml"),
)
LENGTH = 8
CONFIG = tiny_config(segment_length=LENGTH)


def run(*arguments: str) -> str:
    """The output of a Python process. One thread: more would mostly wait for each other."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def last_line(printed: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return summary


def run_bare(name: str) -> str:
    """The output of a benchmark when nothing in `ABSENT` can be imported."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT}))\n"
        f"sys.argv[1:] = {TINY[name]}\n"
        f"runpy.run_module('benchmarks.{name}', run_name='__main__')\n"
    )
    return run("-c", code)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.story) if n in LONG else n for n in TINY],
)
def test_output_ends_with_a_line_of_json(name: str) -> None:
    # The one for GPU machines must run with minimal packages.
    summary = last_line(
        run_bare(name) if name == "model" else run("-m", f"benchmarks.{name}", *TINY[name])
    )
    assert summary["benchmark"] == name
    assert summary["machine"]["cores"] > 0
    assert "torch" in summary["versions"]
    assert summary["table"]
    assert summary["ratios"]
    for ratio in summary["ratios"].values():
        for number in (ratio["lowest"], ratio["median"], ratio["highest"]):
            assert math.isfinite(number)
            assert number > 0


def test_attention_skips_the_peer_if_not_installed() -> None:
    printed = run_bare("attention")
    assert sum("is not installed" in line for line in printed.splitlines()) == 1
    assert {row["peer layer ms"] for row in last_line(printed)["table"]} == {None}


@pytest.mark.skipif(attention.CUDA, reason="other lengths on a GPU")
def test_attention_reports_the_ratios_at_16384_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--lengths 16384 32768 --segment 512 --heads 1 --head-dim 4 --turns 1"
    monkeypatch.setattr(sys, "argv", ["attention", *options.split(), "--full-limit", "0"])
    attention.main()
    summary = last_line(capsys.readouterr().out)
    assert {row["full causal ms"] for row in summary["table"]} == {None}
    assert set(summary["ratios"]) == {
        "16,384 tokens, infini / local only",
        "16,384 tokens, delta / local only",
        "16,384 tokens, layer / peer layer",
        "tokens/s of infini, 32,768 / 16,384 tokens",
    }
    assert set(summary["targets"]) == {
        "16,384 tokens, infini / local only",
        "16,384 tokens, layer / peer layer",
    }


def test_a_target_is_met_by_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    ratio = Ratio(2.0, 1.0, 3.0)
    targets = {"fast": 1.9, "slow": 2.1}
    publish("b", "Heading", [{"": "a row", "ms": None}], dict.fromkeys(targets, ratio), targets)
    printed = capsys.readouterr().out
    assert "fast: 2.00 (1.00 to 3.00), at least 1.9: met\n" in printed
    assert "slow: 2.00 (1.00 to 3.00), at least 2.1: missed\n" in printed
    assert "–" in printed
    summary = last_line(printed)
    assert summary["targets"] == targets
    assert summary["table"] == [{"": "a row", "ms": None}]


def test_utilization_is_measured_on_real_training_steps() -> None:
    training = Training(CONFIG, "cpu")
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    shapes = [Shape(4, LENGTH, False), Shape(1, 4 * LENGTH, True)]
    found = utilization(training, shapes, turns=2, peak=1e15)
    assert list(found) == shapes
    assert all(len(each) == 2 and 0 < min(each) <= max(each) < 1 for each in found.values())
    after = list(training.model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_batch_that_does_not_fit_is_halved() -> None:
    class Small(Training):
        def step(self, shape: Shape) -> None:
            if shape.rows > fits:
                raise torch.OutOfMemoryError
            super().step(shape)

    training = Small(CONFIG, "cpu")
    fits = 3
    assert training.fit(Shape(8, LENGTH, False)) == Shape(2, LENGTH, False)
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        training.fit(Shape(8, LENGTH, False))


def test_make_bench_runs_every_benchmark() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    names = next(line for line in lines if line.startswith("BENCHMARKS")).partition("=")[2]
    assert set(names.split()) == set(TINY)


def test_peers_take_turns_until_the_time_limit() -> None:
    order: list[str] = []

    def peer(name: str) -> float:
        order.append(name)
        return 1.0

    peers = {"a": lambda: peer("a"), "b": lambda: peer("b")}
    assert take_turns(peers, turns=2) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["a", "b", "a", "b"]
    assert len(take_turns(peers, turns=100, seconds=0.0)["a"]) == 3


def test_a_ratio_is_computed_within_each_turn() -> None:
    # The machine is half as fast in the second turn, and ours is twice as fast in all of them.
    assert speed_ratio([1.0, 2.0, 1.5], [2.0, 4.0, 3.0]) == Ratio(2.0, 2.0, 2.0)
