"""Whether the memory is used: the loss with it and without it, and its gates or weights by layer.

The probe reads a few windows of the validation sample with the memory and without it, so that the
difference is of the same windows. It changes neither weights nor random numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from infini_model.model import inspection
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.training.callbacks import Callback, Evaluation
from infini_model.training.parallel import full_tensor
from infini_model.training.setup import TrainingSetup
from infini_model.training.validation import probe_memory

# Steps after the warm-up from which on warnings are due: before, gates have hardly moved and
# memories are hardly trained.
SETTLED_STEPS = 100

log = logging.getLogger(__name__)


class MemoryReports(Callback):
    """Records the memory of the model, and warns once of each way in which it is of no use."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup, self._config = setup, setup.config
        # The newest metrics of the run, and what they were a reason to warn of; on rank 0.
        self._newest: Line = {}
        self._warned: set[str] = set()
        # What the weight of the memory is called in metrics.
        self._kind = "weight" if setup.config.model.memory == "residual" else "gate"

    def on_start(self, step: int) -> None:
        """Read what earlier processes of the run recorded, and so warned of."""
        if not self._setup.world.is_main:
            return
        for line in read_metrics(self._setup.run_dir):
            if line["step"] <= step:
                self._newest |= line
                if "validation/loss" in line:
                    self._warned |= dict(self._findings()).keys()

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """What the probe finds at a validation; warns of it."""
        setup, config = self._setup, self._config
        if evaluation.split != "validation" or config.model.memory == "none":
            return {}
        found = self._weights()
        if config.packing.context_length > config.model.segment_length:
            probe = probe_memory(
                setup.windows[evaluation.split],
                setup.train_module,
                setup.world,
                batch_size=config.training.batch_size,
                max_windows=config.evaluation.max_windows,
            )
            if probe is not None:
                found |= {
                    "memory/probe_loss": probe.loss,
                    "memory/probe_loss_without_memory": probe.loss + probe.gain,
                    "memory/probe_gain": probe.gain,
                    "memory/probe_gain_error": probe.error,
                }
        found = {name: value for name, value in found.items() if math.isfinite(value)}
        self._newest |= found | {"step": evaluation.step}
        if setup.world.is_main:
            for kind, sentence in self._findings():
                if kind not in self._warned:
                    log.warning("At step %d: %s", self._newest["step"], sentence)
                    self._warned.add(kind)
        return found

    def _weights(self) -> dict[str, float]:
        """By layer: `memory/layer_N/gate_mean`, `gate_min` and `gate_max`.

        Of a residual memory they are called `weight_mean` and so on.
        """
        found = {}
        for layer, gate in enumerate(self._setup.model.gate_statistics(full_tensor)):
            prefix = f"memory/layer_{layer}/{self._kind}"
            found[f"{prefix}_mean"] = gate.mean
            found[f"{prefix}_min"] = gate.minimum
            found[f"{prefix}_max"] = gate.maximum
        return found

    def _findings(self) -> Iterator[tuple[str, str]]:
        """What the newest metrics of the run are a reason to warn of: kinds, and sentences."""
        newest, model = self._newest, self._config.model
        step, layers = int(newest["step"]), range(model.num_hidden_layers)
        if model.memory == "none" or step < self._config.training.warmup_steps + SETTLED_STEPS:
            return
        ends = [
            f"memory/layer_{layer}/{self._kind}_{end}" for layer in layers for end in ("min", "max")
        ]
        if all(name in newest for name in ends):
            changes = [newest[name] for name in ends]
            if model.memory != "residual":
                changes = [_logit(share) - model.gate_start for share in changes]
            if sentence := inspection.unmoved(changes, step, self._config):
                yield "gates", sentence
        if "memory/probe_gain_error" in newest:
            gain, error = newest["memory/probe_gain"], newest["memory/probe_gain_error"]
            if sentence := inspection.hurts(gain, error, model.memory):
                yield "gain", sentence


def _logit(share: float) -> float:
    """The gate whose sigmoid is `share`; infinite where that is 0 or 1."""
    if not 0.0 < share < 1.0:
        return math.copysign(math.inf, share - 0.5)
    return math.log(share / (1.0 - share))
