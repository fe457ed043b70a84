"""Inputs of disturbed runs, and what they are compared by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import PATIENCE, Running

STEPS = 120
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 4, "warmup_steps": 10},
    # A training that a test has halted is not hung.
    "launch": {"gpus": "cpu", "hang_timeout_seconds": 4 * PATIENCE},
    "logging": {"logging_steps": 5, "eval_steps": 40},
    "evaluation": {"max_windows": 16},
    "checkpoint": {"save_steps": 20},
}
Start = Callable[..., Running]
Make = Callable[..., dict[str, Any]]


def shards(run_dir: Path) -> dict[str, bytes]:
    """Every shard of the datasets in the output folder of a run."""
    datasets = run_dir.parents[1] / "datasets"
    return {str(p.relative_to(datasets)): p.read_bytes() for p in datasets.glob("tiny-*/*/*.arrow")}
