"""Samples and evaluation tasks of a model in training: `logging.sample_steps`, `evaluation.during`.

They follow a validation, and what they measure is in its line of `metrics.jsonl`. Rank 0 measures
the model itself, not a copy; the other ranks wait. After each batch all agree on whether a signal
ends the training: then the validation starts over, with what follows it, when the run is resumed.
Neither weights nor random numbers change.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from infini_model.evaluation.context import EvalContext
from infini_model.evaluation.task import TaskResult
from infini_model.evaluation.tasks import load_task
from infini_model.evaluation.tasks.sample import continue_document
from infini_model.runtime.errors import ConfigError
from infini_model.training.callbacks import Callback, Evaluation
from infini_model.training.train import Trainer

# Characters of the prompt that are logged with a sample.
SHOWN = 60

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The end of a measurement that a signal cut short."""


class Measurements(Callback):
    """The samples, and the metrics of `evaluation.during.tasks`, at the steps that are due."""

    def attach(self, trainer: Trainer) -> None:
        """Raise `ConfigError` without a validation, and `UserError` as `load_task`."""
        self._trainer, self._world, setup = trainer, trainer.world, trainer.setup
        self._during = trainer.config.evaluation.during
        self._tasks = {name: load_task(name) for name in self._during.tasks}
        if len(setup.windows("validation")) == 0:
            raise ConfigError(
                "logging.sample_steps, evaluation.during: follow a validation, for which split "
                f"validation of {setup.manifest.folder_name} is too small"
            )
        # Of its generation; the training has its own autocast.
        setup.model.precision = trainer.model.precision

    def on_start(self, step: int) -> None:
        """Raise the `UserError` of a task whose settings do not fit."""
        if self._world.is_main:
            with self._context(step) as context:
                for task in self._tasks.values():
                    task.check(context)

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """Measure on rank 0, after a validation at a due step."""
        step, sample_steps = evaluation.step, self._trainer.config.logging.sample_steps
        due: dict[str, Callable[[EvalContext], TaskResult]] = {}
        if sample_steps is not None and step % sample_steps == 0:
            due["logging.sample_steps"] = _log_sample
        if step % self._during.steps == 0:
            due |= {f"evaluation.during: {k}": task.run for k, task in self._tasks.items()}
        if evaluation.split != "validation" or not due:
            return {}
        if not self._world.is_main:
            while self._world.broadcast(lambda: True):  # what `_advance` and its end say
                self._trainer.check_stop()
            return {}
        found = dict[str, float]()
        try:
            for name, measure in due.items():
                try:
                    with self._context(step) as context:
                        context.on_windows = self._advance
                        found |= measure(context).metrics
                except StoppedError:
                    return {}
                except Exception as error:  # noqa: BLE001 - tasks of the harness can raise anything
                    log.warning("step %d: %s failed: %r", step, name, error)
        finally:
            self._world.broadcast(lambda: False)
        return found

    def _advance(self, windows: int) -> None:  # noqa: ARG002
        """Keep the other ranks waiting. Raises `StoppedError` if any received a signal."""
        self._world.broadcast(lambda: True)
        if self._trainer.check_stop():
            raise StoppedError

    @contextlib.contextmanager
    def _context(self, step: int) -> Iterator[EvalContext]:
        setup, name = self._trainer.setup, f"step {step}"
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        # Generation may take operations that have no deterministic kernel.
        torch.use_deterministic_algorithms(mode=False)
        try:
            with tempfile.TemporaryDirectory(prefix="infini-during-") as folder:
                yield EvalContext(
                    *(setup.run_dir, setup.dataset_dir, setup.config, setup.model, setup.windows),
                    name=name,
                    weights_key=name,
                    folder=Path(folder),
                )
        finally:
            torch.use_deterministic_algorithms(mode=is_deterministic)


def _log_sample(context: EvalContext) -> TaskResult:
    if found := continue_document(context):
        # Quoted: a text can have what would command a terminal.
        log.info("Sample at %s: %r → %r", context.name, found[1][-SHOWN:], found[2])
    return TaskResult(section="")
