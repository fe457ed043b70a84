"""The default callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infini_model.config import Config
from infini_model.data.loading.loader import Loader
from infini_model.data.manifest import Manifest
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.callbacks.callback import Callback
from infini_model.training.callbacks.console import Console
from infini_model.training.callbacks.diagnostics import NonFiniteReports
from infini_model.training.callbacks.flops import Utilization
from infini_model.training.callbacks.gates import GateStatistics
from infini_model.training.callbacks.recorder import Recorder
from infini_model.training.callbacks.sinks import Sinks
from infini_model.training.callbacks.spikes import SpikeReports, past_losses
from infini_model.training.callbacks.system_metrics import SystemMetrics
from infini_model.training.parallel.distributed import World
from infini_model.training.provenance import Attribution
from infini_model.training.replica import Replica


@dataclass(frozen=True)
class Training:
    """The parts of a training that callbacks may use; it starts after `step` steps.

    Attributes:
        record: The metrics file, on rank 0 only.
        before_pause: Call it before work that takes much longer than a step.
        save_before: Saves a checkpoint under a folder, positioned after the given window count.
    """

    config: Config
    dataset_dir: Path
    run_dir: Path
    manifest: Manifest
    world: World
    step: int
    model: InfiniLlama
    replica: Replica
    loader: Loader
    record: MetricsFile | None
    before_pause: Callable[[], None]
    save_before: Callable[[Path, int], None]

    @property
    def dataset(self) -> dict[str, str]:
        """Name, key and path of the dataset."""
        path = str(self.dataset_dir.resolve())
        return {"name": self.manifest.name, "key": self.manifest.key, "path": path}


def default_callbacks(t: Training) -> list[Callback]:
    """The callbacks of a rank, in the order they are called."""
    attribution = Attribution(t.dataset_dir, t.loader, t.replica)
    past = past_losses(t.run_dir, t.step, t.world)
    length = t.config.packing.context_length
    step_tokens = t.loader.global_batch * length
    callbacks: list[Callback] = [
        SpikeReports(t.run_dir, t.world.rank, past, attribution, t.before_pause),
        GateStatistics(t.model),
        Utilization(
            t.model,
            length,
            step_tokens,
            t.world.device,
            t.replica.precision,
            t.world.size,
        ),
        Console(t.loader, t.config.training.total_steps, is_main=t.world.is_main),
    ]
    if t.config.logging.debug:
        callbacks.append(
            NonFiniteReports(
                t.run_dir, t.world, t.model, attribution, t.before_pause, t.save_before
            )
        )
    if t.record is not None:
        callbacks += [
            SystemMetrics(),
            Recorder(
                t.record,
                Sinks(t.run_dir, t.config, t.dataset),
                t.loader,
                t.replica,
                step_tokens,
            ),
        ]
    return callbacks
