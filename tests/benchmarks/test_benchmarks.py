"""Each benchmark runs, at a tiny size, and ends with a line of JSON."""

from __future__ import annotations

import importlib
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

from benchmarks import attention, gpu
from benchmarks.report import Ratio, publish, speed_ratio, take_turns
from benchmarks.utilization import Shape, Training, utilization

ROOT = Path(__file__).resolve().parents[2]
TINY = {each.name: list(each.rehearsal) for each in gpu.BENCHMARKS} | {
    "memory_estimate": ["--only", "no memory"],
    "tokenize": ["--megabytes", "0.3", "--vocab-size", "300", "--turns", "1"],
    "incremental": [
        *("--files", "3", "--megabytes", "0.2", "--small-files", "10", "--partitions", "160"),
        *("--turns", "1"),
    ],
    "scale": ["--largest", "10000", "--turns", "1"],
    "requests": ["--partition-megabytes", "1", "--partitions-per-file", "1"],
    "loader": ["--megabytes", "1", "--seconds", "0.01", "--turns", "1"],
    "stored_loader": [
        *("--shards", "2", "--megabytes", "0.5", "--milliseconds", "1", "--turns", "1"),
        *("--step-milliseconds", "1", "--steps", "2", "--batches", "2"),
    ],
}


# Claims about learning take too long for `make bench`.
LEARNING = {
    "memory_gain": [
        *("--seeds", "0", "--only", "no key shift", "--steps", "2", "packing.context_length=160"),
        *("model.segment_length=16", "model.num_hidden_layers=1", "evaluation.max_windows=2"),
        *("data.source.paths=['{stdlib}/json/*.py']", "data.splits.train=0.5"),
        *("data.splits.validation=0.5", "data.splits.test=0"),
    ],
}
# These take the longest.
LONG = (
    *("tokenize", "tokenize_device", "incremental", "model", "step", "memory_gain"),
    *("train_step", "scale", "requests"),
)
# They bind their process to one core, or give it the address of a store.
APART = ("loader", "stored_loader")
# Without a GPU, only Triton's interpreter runs it, which says nothing about its speed.
ON_A_GPU = "tokenize_device"
# Packages missing on a machine with only torch, numpy, pyarrow, pydantic and safetensors.
ABSENT = (
    *("datasets", "gigatoken", "infini_transformer_pytorch", "mlflow", "prefect", "tokenizers"),
    *("transformers", "yaml"),
)
LENGTH = 8
CONFIG = tiny_config(segment_length=LENGTH)


def run(*arguments: str, **variables: str) -> str:
    """The output of a Python process. One thread: more would mostly wait for each other."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
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
    [pytest.param(n, marks=pytest.mark.story) if n in LONG else n for n in TINY | LEARNING],
)
def test_output_ends_with_a_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options = (TINY | LEARNING)[name]
    if name == "model":
        # The one for GPU machines must run with minimal packages.
        printed = run_bare(name)
    elif name == ON_A_GPU:
        pytest.importorskip("triton")
        printed = run("-m", f"benchmarks.{name}", *options, TRITON_INTERPRET="1")
    elif name in (*LONG, *APART):
        printed = run("-m", f"benchmarks.{name}", *options)
    else:
        monkeypatch.setattr(sys, "argv", [name, *options])
        importlib.import_module(f"benchmarks.{name}").main()
        printed = capsys.readouterr().out
    summary = last_line(printed)
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
    limits = {"small": 2.0, "large": 1.9}
    ratios = dict.fromkeys([*targets, *limits], ratio)
    publish("b", "Heading", [{"": "a row", "ms": None}], ratios, targets, limits)
    printed = capsys.readouterr().out
    assert "fast: 2.00 (1.00 to 3.00), at least 1.9: met\n" in printed
    assert "slow: 2.00 (1.00 to 3.00), at least 2.1: missed\n" in printed
    assert "small: 2.00 (1.00 to 3.00), at most 2: met\n" in printed
    assert "large: 2.00 (1.00 to 3.00), at most 1.9: missed\n" in printed
    assert "–" in printed
    summary = last_line(printed)
    assert summary["targets"] == targets
    assert summary["limits"] == limits
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
    """Those that measure something on any machine."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    names = next(line for line in lines if line.startswith("BENCHMARKS")).partition("=")[2]
    assert set(names.split()) == set(TINY) - {ON_A_GPU}


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
