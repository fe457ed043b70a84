"""Each benchmark runs, at a tiny size, and ends with a line of JSON."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attention, gpu
from benchmarks.report import Ratio, publish, run, speed_ratio

# Those of `make gpu` are in its rehearsal, below; `orchestration` would start servers.
TINY = {
    "incremental": "--files 3 --megabytes 0.2 --small-files 10 --turns 1",
    "loader": "--megabytes 1 --seconds 0.01 --turns 1",
    "memory_estimate": "--only activations",
    "memory_gain": "--seeds 0 --only 'no key shift' --steps 2 packing.context_length=160 "
    "model.segment_length=16 model.num_hidden_layers=1 evaluation.max_windows=2 "
    "data.splits.train=0.5 data.splits.validation=0.5 data.splits.test=0 "
    "\"data.source.paths=['{stdlib}/json/*.py']\"",
    "objectives": "--turns 1",
    "passkey": "--steps 2 --trials 1 --seeds 5",
    "recall": "--steps 2 --batches 1 --seeds 5 --only linear",
    "scale": "--largest 10000 --turns 1",
    "tokenize": "--megabytes 0.3 --vocab-size 300 --turns 1",
    "utilization": "--length 64 --segments 32 --hidden-size 32 --turns 1",
}
# They bind their process to one core, or change its environment.
APART = ("loader", "scale", "tokenize")
# After two steps a model remembers nothing, and misses every target.
LEARNING = ("passkey", "recall")


def last_line(printed: str) -> dict[str, Any]:
    return dict(json.loads(printed.splitlines()[-1]))


@pytest.mark.story
@pytest.mark.parametrize("name", TINY)
def test_it_ends_with_a_line_of_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name in APART:
        printed = run(["-m", f"benchmarks.{name}", *shlex.split(TINY[name])], threads=1).printed
    else:
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(TINY[name])])
        main = importlib.import_module(f"benchmarks.{name}").main
        if name in LEARNING:
            with pytest.raises(SystemExit, match=r"^1$"):
                main()
        else:
            main()
        printed = capsys.readouterr().out
    summary = last_line(printed)
    assert summary["benchmark"] == name
    assert summary["machine"]["cores"] > 0
    assert "torch" in summary["versions"]
    assert summary["table"]
    assert summary["ratios"] or name in LEARNING
    for ratio in summary["ratios"].values():
        assert 0 < ratio["lowest"] <= ratio["median"] <= ratio["highest"] < math.inf


@pytest.mark.story
def test_the_rehearsal_of_make_gpu_writes_a_page_and_leaves_the_real_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    page = tmp_path / "page.md"
    only = ("--only", "test_loader", "benchmarks/")
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--output", str(page), *only])
    monkeypatch.setattr(gpu, "LOGS", tmp_path)
    # A lent GPU is given back; this machine may be slow.
    monkeypatch.setattr(gpu, "PART_SECONDS", math.inf)
    monkeypatch.setattr(gpu, "TOTAL_SECONDS", math.inf)
    before = gpu.PAGE.read_text()
    assert gpu.main() == 0
    assert gpu.PAGE.read_text() == before
    _, _, results = page.read_text().partition(gpu.RESULTS)
    assert " passed |" in results
    for name in gpu.BENCHMARKS:
        assert f"| `{name}`: " in results


def test_attention_runs_without_its_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["attention", *gpu.BENCHMARKS["attention"][1].split()])
    monkeypatch.setattr(attention, "CausalAttention", None)
    attention.main()
    printed = capsys.readouterr().out
    assert "is not installed" in printed
    assert {row["peer layer ms"] for row in last_line(printed)["table"]} == {None}


def test_a_target_is_met_by_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    targets, limits = {"fast": 1.9, "slow": 2.1}, {"small": 2.0, "large": 1.9}
    ratios = dict.fromkeys([*targets, *limits], Ratio(2.0, 1.0, 3.0))
    publish("b", "Heading", [{"": "a row", "ms": None}], ratios, targets, limits)
    printed = capsys.readouterr().out
    assert "fast: 2.00 (1.00 to 3.00), at least 1.9: met\n" in printed
    assert "slow: 2.00 (1.00 to 3.00), at least 2.1: missed\n" in printed
    assert "small: 2.00 (1.00 to 3.00), at most 2: met\n" in printed
    assert "large: 2.00 (1.00 to 3.00), at most 1.9: missed\n" in printed


def test_a_ratio_is_computed_within_each_turn() -> None:
    # The machine is half as fast in the second turn, and ours is twice as fast in all of them.
    assert speed_ratio([1.0, 2.0, 1.5], [2.0, 4.0, 3.0]) == Ratio(2.0, 2.0, 2.0)
