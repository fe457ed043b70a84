"""How a training that failed is retried, and how its batch is divided then.

The launcher records the failures in `<run>/recovery.json`. Out of memory: smaller micro-batches and
more accumulation steps, with the same global batch. NaN or infinity: resume from the newest
checkpoint at most twice. Preemption, crash and hang: resume from the newest checkpoint.
User errors are not retried.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from infini_model.config import Config, TrainingConfig
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.records import Record, read_record, write_record
from infini_model.training.launch.failures import Kind, TrainingFailure

MAX_NON_FINITE_RETRIES = 2
FILE = "recovery.json"


@dataclass(frozen=True)
class BatchPlan:
    """How the windows of a global batch are divided.

    Each of the `processes` ranks has `accumulation` micro-batches of `micro_batch` windows.
    """

    processes: int
    accumulation: int
    micro_batch: int

    @classmethod
    def of(
        cls,
        training: TrainingConfig,
        processes: int,
        global_batch: int | None = None,
        divisor: int = 1,
    ) -> BatchPlan:
        """Divide a run's global batch among `processes`.

        What the user has set in `training` decides the global batch of a run that begins, which has
        None, and later only limits the micro-batch, to `batch_size` windows. Micro-batches are
        split into `divisor` parts, see `Recovery`.

        Raises `ConfigError` if the batch does not divide evenly.
        """
        if global_batch is None:
            global_batch = processes * training.gradient_accumulation_steps * training.batch_size
        share, rest = divmod(global_batch, processes)
        if rest or share == 0:
            raise ConfigError(
                f"launch.processes: {processes} processes cannot split this run's global batch of "
                f"{global_batch} windows evenly; use a divisor of {global_batch}"
            )
        largest = max(1, min(share, training.batch_size // divisor))
        micro_batch = next(size for size in range(largest, 0, -1) if share % size == 0)
        return cls(processes, share // micro_batch, micro_batch)

    @property
    def global_batch(self) -> int:
        """Windows per step, over all ranks."""
        return self.processes * self.accumulation * self.micro_batch

    def applied_to(self, config: Config) -> Config:
        """`config` with the batches that each rank really takes."""
        batch = {"batch_size": self.micro_batch, "gradient_accumulation_steps": self.accumulation}
        return config.updated(training=batch)


class Attempt(Record):
    """A training that failed."""

    kind: Kind
    message: str
    time: float


class Recovery(Record):
    """The failures so far, and what they change.

    Attributes:
        attempts: The failures, oldest first.
        micro_batch_divisor: Parts into which a configured micro-batch is split.
    """

    attempts: tuple[Attempt, ...] = ()
    micro_batch_divisor: int = 1

    @property
    def recomputes_all(self) -> bool:
        """True after running out of memory: `auto` then means all layers, as it was too few."""
        return any(each.kind == "out of memory" for each in self.attempts)

    def after(self, failure: TrainingFailure, config: Config) -> Recovery:
        """The recovery once `failure` has happened with the user's `config`.

        Marks the failure as final if a retry would not help.
        """
        attempt = Attempt(kind=failure.kind, message=failure.message, time=time.time())
        changed = self.model_copy(update={"attempts": (*self.attempts, attempt)})
        if failure.kind == "out of memory":
            size = config.training.batch_size // self.micro_batch_divisor
            was_least = self.recomputes_all or config.launch.gradient_checkpointing != "auto"
            failure.is_final = size == 1 and was_least
            factor = next((n for n in range(2, size + 1) if size % n == 0), 1)
            divisor = self.micro_batch_divisor * factor
            return changed.model_copy(update={"micro_batch_divisor": divisor})
        if failure.kind == "non-finite":
            times = sum(each.kind == failure.kind for each in changed.attempts)
            failure.is_final = times > MAX_NON_FINITE_RETRIES
        return changed


def read_recovery(run_dir: Path) -> Recovery:
    """Read `recovery.json` of a run folder. Raises `DataError` if it is damaged."""
    path = run_dir / FILE
    return read_record(path, Recovery) if path.is_file() else Recovery()


def record_failure(run_dir: Path, failure: TrainingFailure, config: Config) -> None:
    """Add `failure`, with the user's `config`, to `recovery.json`; only the first node writes.

    Marks the failure as final if a retry would not help.
    """
    recovery = read_recovery(run_dir).after(failure, config)
    if config.launch.node_rank == 0:
        write_record(run_dir / FILE, recovery)
