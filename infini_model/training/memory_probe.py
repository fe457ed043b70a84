"""Whether the memory is used: its gates or weights, its share of the output, what it gains.

The probe reads a few windows of the validation sample with the memory and without it, so that the
difference is of the same windows. It changes neither weights nor random numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from infini_model.config import Config
from infini_model.model.inspection import findings
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.training.callbacks import Callback, Evaluation, Step
from infini_model.training.parallel import full_tensor
from infini_model.training.setup import TrainingSetup
from infini_model.training.validation import Probe, probe_memory

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

    def on_start(self, step: int) -> None:
        """Read what earlier processes of the run recorded, and so warned of."""
        if not self._setup.world.is_main:
            return
        for line in read_metrics(self._setup.run_dir):
            if line["step"] <= step:
                self._newest |= line
                if "validation/loss" in line:
                    self._warned |= dict(_findings(self._newest, self._config)).keys()

    def metrics(self, step: Step) -> dict[str, float]:
        """`memory/layer_N/gate_mean`, `gate_min` and `gate_max`.

        Of a residual memory they are called `weight_mean` and so on.
        """
        if not step.logged:
            return {}
        values, kind = dict[str, float](), _weight_kind(self._config)
        for layer, gate in enumerate(self._setup.model.gate_statistics(full_tensor)):
            values |= {
                f"memory/layer_{layer}/{kind}_mean": gate.mean,
                f"memory/layer_{layer}/{kind}_min": gate.minimum,
                f"memory/layer_{layer}/{kind}_max": gate.maximum,
            }
        self._newest |= values
        return values

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """What the probe finds at a validation; warns of it."""
        setup, config = self._setup, self._config
        if evaluation.split != "validation" or config.model.memory == "none":
            return {}
        found: dict[str, float] = {}
        if not _one_segment(config):
            probe = probe_memory(
                setup.windows[evaluation.split],
                setup.train_module,
                setup.world,
                batch_size=config.training.batch_size,
                max_windows=config.evaluation.max_windows,
            )
            found = {} if probe is None else dict(_metrics_of(probe))
        self._newest |= found | {"step": evaluation.step}
        if setup.world.is_main:
            self._warn()
        return found

    def _warn(self) -> None:
        for kind, sentence in _findings(self._newest, self._config):
            if kind not in self._warned:
                log.warning("At step %d: %s", self._newest["step"], sentence)
                self._warned.add(kind)


def _weight_kind(config: Config) -> str:
    """What the weight of the memory is called in metrics."""
    return "weight" if config.model.memory == "residual" else "gate"


def _one_segment(config: Config) -> bool:
    return config.packing.context_length <= config.model.segment_length


def _metrics_of(probe: Probe) -> Iterator[tuple[str, float]]:
    """The metrics of a probe by name; those that are not finite are left out."""
    values = {
        "memory/probe_loss": probe.loss,
        "memory/probe_loss_without_memory": probe.loss + probe.gain,
        "memory/probe_gain": probe.gain,
        "memory/probe_gain_error": probe.error,
    }
    layers = zip(probe.use.mean_shares.mean(1).tolist(), probe.use.mean_norms.tolist(), strict=True)
    for layer, (share, (kv, normaliser)) in enumerate(layers):
        values |= {
            f"memory/layer_{layer}/share": share,
            f"memory/layer_{layer}/kv_norm": kv,
            f"memory/layer_{layer}/normaliser_norm": normaliser,
        }
    return ((name, value) for name, value in values.items() if math.isfinite(value))


def _findings(newest: Line, config: Config) -> Iterator[tuple[str, str]]:
    """What the newest metrics of a run are a reason to warn of: kinds, and sentences."""
    step, layers = int(newest["step"]), range(config.model.num_hidden_layers)
    if config.model.memory == "none" or step < config.training.warmup_steps + SETTLED_STEPS:
        return
    memory, kind = config.model.memory, _weight_kind(config)
    ends = [f"memory/layer_{layer}/{kind}_{end}" for layer in layers for end in ("min", "max")]
    shares = [f"memory/layer_{layer}/share" for layer in layers]
    found: dict[str, str | None] = {}
    if all(name in newest for name in ends):
        began = config.model.gate_start
        still, changes = "The memory's weights are still at 0", [newest[name] for name in ends]
        if memory != "residual":
            still = f"All gates are still at model.gate_start={began:g}"
            changes = [_logit(share) - began for share in changes]
        found["gates"] = findings.unmoved(changes, still, step, one_segment=_one_segment(config))
    if all(name in newest for name in shares):
        found["shares"] = findings.never_read([newest[name] for name in shares], memory)
    if "memory/probe_gain_error" in newest:
        gain, error = newest["memory/probe_gain"], newest["memory/probe_gain_error"]
        found["gain"] = findings.hurts(gain, gain - 2.0 * error, gain + 2.0 * error, memory)
    yield from ((kind, sentence) for kind, sentence in found.items() if sentence)


def _logit(share: float) -> float:
    """The gate whose sigmoid is `share`; infinite where that is 0 or 1."""
    if not 0.0 < share < 1.0:
        return math.copysign(math.inf, share - 0.5)
    return math.log(share / (1.0 - share))
