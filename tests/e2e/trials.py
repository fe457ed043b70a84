"""What the disturbed runs are made of and compared by."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import Running

STEPS = 120
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 4, "warmup_steps": 10},
    "launch": {"gpus": "cpu"},
    "logging": {"logging_steps": 5, "eval_steps": 40},
    "evaluation": {"max_windows": 16},
    "checkpoint": {"save_steps": 20},
}
Start = Callable[..., Running]
Make = Callable[..., dict[str, Any]]


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
