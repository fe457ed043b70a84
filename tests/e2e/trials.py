"""What the disturbed runs are made of and compared by."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import Running

from infini_model.training.metrics_file import Line, read_metrics

CLOCK = frozenset(
    {"time", "train/step_seconds", "train/tokens_per_second", "train/data_wait_seconds"}
)
STEPS = 120
TRAINING = {
    "max_steps": STEPS,
    "batch_size": 4,
    "warmup_steps": 10,
    "logging_steps": 5,
    "eval_steps": 40,
    "eval_batches": 2,
    "save_steps": 20,
    "gpus": "cpu",
}
Start = Callable[..., Running]
Make = Callable[..., dict[str, Any]]


def repeatable(run_dir: Path) -> list[Line]:
    """metrics.jsonl without what the clock decides."""
    return [
        {name: value for name, value in line.items() if name not in CLOCK}
        for line in read_metrics(run_dir)
    ]


def shards(output: Path) -> dict[str, bytes]:
    """Every shard of the dataset folders in an output folder, by its path there."""
    datasets = output / "datasets"
    return {str(p.relative_to(datasets)): p.read_bytes() for p in datasets.glob("tiny-*/*/*.arrow")}


@dataclass(frozen=True)
class Undisturbed:
    """A finished run: its output folder, its run folder, its settings and what it printed."""

    output: Path
    run_dir: Path
    settings: Path
    printed: str
