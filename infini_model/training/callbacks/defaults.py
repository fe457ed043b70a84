"""The default callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infini_model.training.callbacks.callback import Callback
from infini_model.training.callbacks.console import Console
from infini_model.training.callbacks.diagnostics import NonFiniteReports
from infini_model.training.callbacks.flops import Utilization
from infini_model.training.callbacks.memory import MemoryReports
from infini_model.training.callbacks.recorder import Recorder
from infini_model.training.callbacks.sinks import Sinks
from infini_model.training.callbacks.spikes import SpikeReports, past_losses
from infini_model.training.callbacks.system_metrics import SystemMetrics
from infini_model.training.parts import Parts
from infini_model.training.provenance import Attribution


def default_callbacks(
    parts: Parts, before_pause: Callable[[], None], save_before: Callable[[Path, int], None]
) -> list[Callback]:
    """The callbacks of a rank, in the order they are called.

    Args:
        parts: Of the training.
        before_pause: To be called before work that takes much longer than a step.
        save_before: Saves a checkpoint under a folder, positioned after the given window count.
    """
    run_dir, world, model, config = parts.run_dir, parts.world, parts.model, parts.config
    attribution = Attribution(parts.dataset_dir, parts.loader, parts.replica)
    past = past_losses(run_dir, parts.start.step, world)
    callbacks: list[Callback] = []
    if parts.record is not None:
        sinks = Sinks(run_dir, config, parts.dataset)
        callbacks.append(
            Recorder(parts.record, sinks, parts.loader, parts.replica, parts.step_tokens)
        )
        callbacks.append(SystemMetrics())
    callbacks += [
        SpikeReports(run_dir, world.rank, past, attribution, before_pause),
        MemoryReports(parts),
        Utilization(
            model,
            config.packing.context_length,
            parts.step_tokens,
            world.device,
            parts.replica.precision,
            world.size,
        ),
        Console(parts.loader, config.training.total_steps, is_main=world.is_main),
    ]
    if config.logging.debug:
        reports = NonFiniteReports(run_dir, world, model, attribution, before_pause, save_before)
        callbacks.append(reports)
    return callbacks
