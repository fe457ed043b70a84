"""The reproducible results of a training."""

from __future__ import annotations

from pathlib import Path

from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import newest_checkpoint

# Metrics that depend on time and machine.
CLOCK = frozenset(
    {
        "time",
        "train/step_seconds",
        "train/tokens_per_second",
        "train/data_wait_seconds",
        "train/mfu",
        "train/peak_memory_megabytes",
        "checkpoint/stall_seconds",
    }
)
MACHINE = "system/"


def curve(run_dir: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in read_metrics(run_dir) if name in line}


def repeatable(run_dir: Path) -> list[Line]:
    """metrics.jsonl without metrics that depend on time and machine."""
    lines = [
        {k: v for k, v in line.items() if k not in CLOCK and not k.startswith(MACHINE)}
        for line in read_metrics(run_dir)
    ]
    return [line for line in lines if len(line) > 1]


def weights(run_dir: Path) -> tuple[str, list[bytes]]:
    """The name of the newest checkpoint, and its reproducible files as bytes."""
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    files = [*sorted((checkpoint / "model").iterdir()), checkpoint / "optimizer.safetensors"]
    return checkpoint.name, [path.read_bytes() for path in files]
