"""Each benchmark runs, at a tiny size, and ends with a line of JSON; verdicts of some."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llamas import write_llama

from benchmarks import gpu, passkey, recall
from benchmarks.report import Ratio, publish, run, speed_ratio

KEPT = "--results {folder}/results.jsonl --folder {folder}"
SMALL = (
    "packing.context_length=320 evaluation.max_windows=2 "
    "data.splits.train=0.5 data.splits.validation=0.5 data.splits.test=0 "
    "\"data.source.paths=['{{stdlib}}/json/*.py']\""
)
# Those of `make gpu` are in its rehearsal, below; `orchestration` would start servers.
TINY = {
    "incremental": "--files 3 --megabytes 0.2 --small-files 10 --turns 1",
    "loader": "--megabytes 1 --seconds 0.01 --turns 1",
    "memory_estimate": "--only activations",
    "memory_gain": f"--forms window 'gated delta + window' --seeds 0 --steps 2 {KEPT} {SMALL}",
    "objectives": "--turns 1",
    "optimizers": f"--rates 1e-3 --seeds 0 1 --steps 2 {KEPT} {SMALL}",
    "passkey": "--steps 2 --trials 1 --seeds 5",
    "recall": "--steps 2 --batches 1 --seeds 5 --only linear --results {folder}/results.jsonl",
    "scale": "--largest 10000 --turns 1",
    "tokenize": "--megabytes 0.3 --vocab-size 300 --turns 1",
    "uptrain": f"--only 'residual, LoRA' --pretraining-steps 2 --steps 8 --seeds 0 {KEPT} {SMALL}",
    "uptrain --weights": (
        f"{{folder}}/llama --context 1536 --only 'memory alone' --steps 1 --seeds 0 {KEPT} "
        f"data.tokenizer.spec=bytes {SMALL.replace('packing.context_length=320 ', '')}"
    ),
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    name, *options = shlex.split(f"{name} {TINY[name].format(folder=tmp_path)}")
    if "--weights" in options:
        write_llama(tmp_path / "llama")
    if name in APART:
        printed = run(["-m", f"benchmarks.{name}", *options], threads=1).printed
    else:
        monkeypatch.setattr(sys, "argv", [name, *options])
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


# Hashes of the tensors of `Questions`, of 64 rows each with the seed 5, by segments, writings and
# whether answers are masked tokens.
PUBLISHED = {
    (8, 1, False): "81f44cb2b6a20543",
    (8, 2, False): "cc0dbf0591becd49",
    (8, 2, True): "a25af5ad199f7c14",
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_associations_are_those_of_the_published_figures(case: tuple[int, int, bool]) -> None:
    segments, writings, masked = case
    batch = recall.draw(64, segments, writings, torch.Generator().manual_seed(5), masked=masked)
    content = b"".join(tensor.numpy().tobytes() for tensor in batch)
    assert hashlib.sha256(content).hexdigest()[:16] == PUBLISHED[case]


def test_each_key_is_asked_once_in_the_last_segment_for_its_newest_value() -> None:
    batch = recall.draw(64, 8, 2, torch.Generator().manual_seed(0))
    asked = 7 * 32
    for tokens, labels, written in zip(*(x.tolist() for x in batch), strict=True):
        pairs = [(at, tokens[at]) for at in range(asked) if tokens[at] < recall.KEYS]
        newest = {key: (at // 32, tokens[at + 1]) for at, key in pairs}
        assert (len(pairs), len(newest)) == (16, 8)
        answers = {
            tokens[at]: (written[at], labels[at]) for at in range(len(tokens)) if labels[at] != -100
        }
        assert answers == newest
        assert not any(
            recall.KEYS <= token < recall.KEYS + recall.VALUES for token in tokens[asked:]
        )


def test_the_table_of_recall_judges_every_seed() -> None:
    good = {"8 segments": 98.0, "16 segments": 95.0, "64 segments": 90.0}
    good |= {"worst quarter": 85.0, "knocked out": 10.0}
    results = {"linear": {0: good, 1: {**good, "64 segments": 89.9}}}
    rows = {row[""]: row for row in recall.tabulate(results)}
    assert rows["linear needs"]["64 segments"] == "≥ 90 missed"
    assert rows["linear needs"]["knocked out"] == "≤ 10 met"


def test_every_cell_of_every_seed_is_judged_up_to_four_times_the_trained_length() -> None:
    good, bad = (
        passkey.Outcome(
            {length: [100.0] * 20 + [worst] for length in passkey.ASKED}, 0.0, [50.0], 1.0, 2.0
        )
        for worst in (95.0, 94.9)
    )
    *_, needs = passkey.tabulate({0: good, 1: good})
    assert needs["worst of 32"] == needs["worst of 128"] == "≥ 95 met"
    assert needs["worst of 512"] is None
    *rows, needs = passkey.tabulate({0: good, 1: bad})
    assert needs["worst of 128"] == "≥ 95 missed"
    assert rows[1]["worst of 512"] == 94.9
    assert passkey.by_depth({0: good, 1: bad})[-1] == pytest.approx([0.9495] * 3)
