"""What a training does differently when it is tried again after a failure.

The launcher keeps it in `<run>/recovery.json`. Out of memory: the micro-batch is cut and the
accumulation grows with it, the global batch stays. NaN or infinity: the newest checkpoint is gone
on with at most twice, if asked without the global batch that did it. Preemption, crash, hang and
timeout: the newest checkpoint is gone on with. What the user has to mend is not tried again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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

# How often a training goes on after NaN or infinity.
MOST_NON_FINITE = 2
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
    """What the failures so far have led to.

    Attributes:
        attempts: The failures, oldest first.
        micro_batch_divisor: Parts that a micro-batch of the settings is read in.
        skipped: Global batches to pass over, each by the number of windows before it.
    """

    attempts: tuple[Attempt, ...] = ()
    micro_batch_divisor: int = 1
    skipped: tuple[int, ...] = ()

    def applied_to(self, config: Config) -> Config:
        """`config` with the same batches in smaller parts."""
        parts, training = self.micro_batch_divisor, config.training
        smaller = {
            "batch_size": training.batch_size // parts,
            "gradient_accumulation_steps": training.gradient_accumulation_steps * parts,
        }
        return config.model_copy(update={"training": training.model_copy(update=smaller)})

    def after(self, failure: TrainingFailure, config: Config, step: int) -> Recovery:
        """What `failure` after `step` steps of `config`, the user's own, adds to it.

        Marks the failure as final where trying again would not help.
        """
        attempt = Attempt(failure.kind, failure.message, failure.rank, step, time.time())
        changed = replace(self, attempts=(*self.attempts, attempt))
        if isinstance(failure, OutOfMemory):
            micro_batch = config.training.batch_size // self.micro_batch_divisor
            failure.is_final = micro_batch == 1
            parts = self.micro_batch_divisor * _smallest_factor(micro_batch)
            return replace(changed, micro_batch_divisor=parts)
        if isinstance(failure, NonFiniteFailure):
            times = sum(attempt.kind == failure.kind for attempt in changed.attempts)
            failure.is_final = times > MOST_NON_FINITE
            if config.launch.skip_non_finite and failure.consumed is not None:
                return replace(changed, skipped=(*self.skipped, failure.consumed))
        return changed

    def describe(self, config: Config) -> str:
        """One line of what is done differently than `config` says, and why; empty if nothing is."""
        if not self.attempts:
            return ""
        last, now = self.attempts[-1], self.applied_to(config).training
        told = [f"Going on after: {last.kind} at step {last.step + 1}"]
        if self.micro_batch_divisor > 1:
            accumulation = f"gradient_accumulation_steps {now.gradient_accumulation_steps}"
            told.append(f"batch_size {now.batch_size}, {accumulation}, the same global batch")
        if self.skipped:
            told.append(f"passing over the global batches at windows {list(self.skipped)}")
        return "; ".join(told)


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, number + 1) if number % n == 0), 1)


def read_recovery(run_dir: Path) -> Recovery:
    """What is kept in a run folder. Raises `CheckpointError` if that is damaged."""
    path = run_dir / FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        attempts = tuple(Attempt(**attempt) for attempt in tree["attempts"])
        return Recovery(attempts, int(tree["micro_batch_divisor"]), tuple(tree["skipped"]))
    except (FileNotFoundError, NotADirectoryError):
        return Recovery()
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is damaged; delete it to begin without") from error


def record_failure(run_dir: Path, failure: TrainingFailure, config: Config) -> None:
    """Keep what `failure` of the user's `config` teaches; of several machines the first one does.

    Marks the failure as final where trying again would not help.
    """
    lines = read_metrics(run_dir)
    step = int(lines[-1]["step"]) if lines else 0
    recovery = read_recovery(run_dir).after(failure, config, step)
    if config.launch.node_rank == 0:
        write_json(run_dir / FILE, asdict(recovery))
