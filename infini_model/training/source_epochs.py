"""The epochs of each source of a mixture, and limits on them.

Up to four passes over the same text teach almost as much as new text (Muennighoff et al., arXiv
2305.16264).
"""

from __future__ import annotations

import logging

from infini_model.runtime.errors import ConfigError
from infini_model.training.callbacks import Callback, Step
from infini_model.training.setup import TrainingSetup

MANY_EPOCHS = 4.0

log = logging.getLogger(__name__)


class SourceEpochs(Callback):
    """Records the epochs of each named source, `train/web/epochs`, and warns of many."""

    def __init__(self, setup: TrainingSetup) -> None:
        """Raise `ConfigError` if the training reads a source beyond `packing.max_epochs`."""
        self._setup = setup
        self._planned = self._epochs(setup.windows_by(setup.config.training.total_steps))
        self._limits = setup.config.packing.max_epochs or {}
        if unknown := self._limits.keys() - self._planned.keys():
            known = ", ".join(self._planned) or "one without a name"
            raise ConfigError(f"packing.max_epochs.{min(unknown)}: the sources are {known}")
        for name, limit in self._limits.items():
            if self._planned[name] > limit:
                raise ConfigError(
                    f"packing.max_epochs.{name}: is {limit:g}, but the training reads this source "
                    f"{self._planned[name]:.2f} times; lower its packing.weights or the steps"
                )

    def on_start(self, step: int) -> None:  # noqa: ARG002
        """Warn of sources that are read often and have no limit."""
        for name, epochs in self._planned.items():
            if epochs > MANY_EPOCHS and name not in self._limits and self._setup.world.is_main:
                log.warning(
                    "source %s is read %.1f times, and more than %g passes teach little: lower "
                    "packing.weights.%s, or set packing.max_epochs.%s",
                    *(name, epochs, MANY_EPOCHS, name, name),
                )

    def metrics(self, step: Step) -> dict[str, float]:
        """The epochs of each source so far, at a logged step."""
        if not step.logged:
            return {}
        epochs = self._epochs(step.windows_read)
        return {f"train/{name}/epochs": count for name, count in epochs.items()}

    def _epochs(self, windows_read: int) -> dict[str, float]:
        epochs = self._setup.loader.epochs(windows_read)
        return {name: count for name, count in epochs.items() if name}
