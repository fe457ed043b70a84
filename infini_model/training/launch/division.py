"""How the windows of a global batch are split among processes and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from infini_model.config import Config, TrainingConfig
from infini_model.runtime.errors import ConfigError


@dataclass(frozen=True)
class Division:
    """How the windows of a global batch are split.

    Attributes:
        processes: Ranks, each with an equal share.
        accumulation: Micro-batches per rank.
        micro_batch: Windows per micro-batch.
    """

    processes: int
    accumulation: int
    micro_batch: int

    @property
    def global_batch(self) -> int:
        """Windows per step, over all ranks."""
        return self.processes * self.accumulation * self.micro_batch

    def applied_to(self, config: Config) -> Config:
        """`config` with the batches that this rank really takes."""
        batch = {"batch_size": self.micro_batch, "gradient_accumulation_steps": self.accumulation}
        return config.updated(training=batch)


def divide(training: TrainingConfig, processes: int, global_batch: int | None) -> Division:
    """Divide a run's global batch among `processes`.

    `global_batch` is fixed when a run first starts; None means that start. After that, the settings
    only limit the micro-batch, to `batch_size` windows.

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
    largest = min(share, training.batch_size)
    micro_batch = next(size for size in range(largest, 0, -1) if share % size == 0)
    return Division(processes, share // micro_batch, micro_batch)
