"""How a training that failed is retried.

The launcher records the failures in `<run>/recovery.json`. Out of memory: smaller micro-batches and
more accumulation steps, with the same global batch. NaN or infinity: resume from the newest
checkpoint at most twice, optionally skipping the global batch at fault. Preemption, crash, hang and
timeout: resume from the newest checkpoint. User errors are not retried.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from infini_model.config import Config
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.storage import write_json
from infini_model.training.launch.failures import (
    Kind,
    NonFiniteFailure,
    OutOfMemory,
    TrainingFailure,
)

MAX_NON_FINITE_RETRIES = 2
FILE = "recovery.json"


@dataclass(frozen=True)
class Attempt:
    """A training that failed after `step` steps."""

    kind: Kind
    message: str
    rank: int | None
    step: int
    time: float


@dataclass(frozen=True)
class Recovery:
    """The failures so far, and what they change.

    Attributes:
        attempts: The failures, oldest first.
        micro_batch_divisor: Number of parts that a configured micro-batch is split into.
        skipped: Global batches to skip, each given by the number of windows before it.
    """

    attempts: tuple[Attempt, ...] = ()
    micro_batch_divisor: int = 1
    skipped: tuple[int, ...] = ()

    def applied_to(self, config: Config) -> Config:
        """`config` with its micro-batches split; the global batch stays the same.

        The micro-batches may be smaller than the user's, where a gang on Ray divides a batch anew.
        """
        training = config.training
        windows = training.batch_size * training.gradient_accumulation_steps
        most = max(1, training.batch_size // self.micro_batch_divisor)
        size = next(size for size in range(most, 0, -1) if windows % size == 0)
        smaller = {"batch_size": size, "gradient_accumulation_steps": windows // size}
        return config.updated(training=smaller)

    def after(self, failure: TrainingFailure, config: Config, step: int) -> Recovery:
        """The recovery once `failure` has happened, after `step` steps of the user's `config`.

        Marks the failure as final if a retry would not help, and counts it.
        """
        attempt = Attempt(failure.kind, failure.message, failure.rank, step, time.time())
        changed = replace(self, attempts=(*self.attempts, attempt))
        alike = itertools.takewhile(
            lambda each: each.message == failure.message, reversed(changed.attempts)
        )
        failure.times = len(list(alike))
        if isinstance(failure, OutOfMemory):
            micro_batch = config.training.batch_size // self.micro_batch_divisor
            failure.is_final = micro_batch == 1
            parts = self.micro_batch_divisor * _smallest_factor(micro_batch)
            return replace(changed, micro_batch_divisor=parts)
        if isinstance(failure, NonFiniteFailure):
            times = sum(attempt.kind == failure.kind for attempt in changed.attempts)
            failure.is_final = times > MAX_NON_FINITE_RETRIES
            if config.launch.skip_non_finite and failure.consumed is not None:
                return replace(changed, skipped=(*self.skipped, failure.consumed))
        return changed

    def describe(self, config: Config) -> str:
        """One line on the last failure and the deviations from `config`; empty if none failed.

        The step from which the training resumes is told by the training itself.
        """
        if not self.attempts:
            return ""
        last, now = self.attempts[-1], self.applied_to(config).training
        parts = [f"Resuming after: {last.kind}"]
        if self.micro_batch_divisor > 1:
            accumulation = f"gradient_accumulation_steps {now.gradient_accumulation_steps}"
            parts.append(f"batch_size {now.batch_size}, {accumulation}, the same global batch")
        if self.skipped:
            parts.append(f"skipping the global batches at windows {list(self.skipped)}")
        return "; ".join(parts)


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def recovery_of(tree: Mapping[str, Any]) -> Recovery:
    """A recovery from its JSON. Raises `ValueError`, `KeyError` or `TypeError` if that is wrong."""
    attempts = tuple(Attempt(**attempt) for attempt in tree["attempts"])
    return Recovery(attempts, int(tree["micro_batch_divisor"]), tuple(tree["skipped"]))


def read_recovery(run_dir: Path) -> Recovery:
    """Read `recovery.json` of a run folder. Raises `CheckpointError` if it is damaged."""
    path = run_dir / FILE
    try:
        return recovery_of(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return Recovery()
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged; delete it to start without it") from error


def record_failure(run_dir: Path, failure: TrainingFailure, config: Config) -> None:
    """Add `failure`, with the user's `config`, to `recovery.json`; only the first node writes.

    Marks the failure as final if a retry would not help, and counts it.
    """
    lines = read_metrics(run_dir)
    step = int(lines[-1]["step"]) if lines else 0
    recovery = read_recovery(run_dir).after(failure, config, step)
    if config.launch.node_rank == 0:
        write_json(run_dir / FILE, asdict(recovery))
