"""The training loop: validate, step, save, until the last step or a signal.

The loss of a step is the sum of all token losses of the global batch divided by the number of
targets, so it does not depend on how the batch is split into processes and micro-batches. A run
that is interrupted and resumed takes bit-identical steps: its state is the weights, AdamW's
moments, the step and the number of windows consumed. Checkpoints are written in the background; no
rank exits before the last one is on disk.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from infini_model.config import Config
from infini_model.data.loading.windows import Batch
from infini_model.runtime.errors import NonFiniteError, UserError
from infini_model.runtime.runs import MODEL
from infini_model.training.banner import log_banner
from infini_model.training.callbacks.callback import Callback, Callbacks, Evaluation, Status, Step
from infini_model.training.callbacks.defaults import default_callbacks
from infini_model.training.callbacks.diagnostics import REMEDIES, non_finite_error
from infini_model.training.checkpoints.saving import only_writer
from infini_model.training.initial_weights import record_initial_weights
from infini_model.training.optimizer import set_learning_rate
from infini_model.training.parallel.distributed import (
    StopSignals,
    deterministic_algorithms,
    join_world,
    received_stop,
)
from infini_model.training.parallel.sharding import gathered
from infini_model.training.parts import Parts, build_parts
from infini_model.training.validation import validate_split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a training ended: complete at `step`, or stopped by a signal with that step saved."""

    step: int
    stopped_by: int | None


def train(
    config: Config, dataset_dir: Path, run_dir: Path, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Train in this process, which is one rank of several under torchrun.

    Resumes from the newest complete checkpoint in `run_dir`, if there is one. `callbacks` run
    before the default ones.

    Raises:
        UserError: The settings do not match the dataset or the run, or a folder is not writable.
        NonFiniteError: The loss or a gradient is NaN or infinite; nothing was overwritten.
    """
    with (
        StopSignals() as stops,
        join_world(config.launch) as world,
        only_writer(run_dir, world),
        contextlib.ExitStack() as stack,
    ):
        if config.launch.deterministic and world.device.type == "cuda":
            stack.enter_context(deterministic_algorithms())
        trainer = Trainer(build_parts(config, dataset_dir, run_dir, world), stops, callbacks)
        status: Status = "FAILED"
        try:
            outcome = trainer.run()
            status = "FINISHED" if outcome.stopped_by is None else "KILLED"
        finally:
            trainer.close(status)
        return outcome


class Trainer:
    """A training at one step."""

    def __init__(
        self, parts: Parts, stops: StopSignals, callbacks: Sequence[Callback] = ()
    ) -> None:
        """`callbacks` run before the default ones."""
        self._parts, self._stops = parts, stops
        self.config, self.run_dir, self.world = parts.config, parts.run_dir, parts.world
        self.model, self.optimizer, self.replica = parts.model, parts.optimizer, parts.replica
        self.windows, self.loader = parts.windows, parts.loader
        self.record, self.checkpointer = parts.record, parts.checkpointer
        self.step = parts.start.step
        self.stopped_by: int | None = None
        self._skipped = parts.recovery.skipped
        defaults = default_callbacks(
            parts,
            before_pause=lambda: self._callbacks.before_pause(),
            save_before=self._save_before,
        )
        self._callbacks = Callbacks([*callbacks, *defaults])
        log_banner(parts)

    def run(self) -> Outcome:
        """Train to the last step, or until a signal stops it."""
        total, began_at = self.config.training.total_steps, self.step
        eval_steps, save_steps = self.config.logging.eval_steps, self.config.checkpoint.save_steps
        self._callbacks.on_start(self.step)
        while not self._is_stopped():
            if self.step % eval_steps == 0 or self.step == total:
                self._evaluate("validation")
            if self.step == total:
                self._evaluate("test")
                break
            if not self._is_stopped():
                self._take_step()
                if self.step == began_at + 1:
                    self.checkpointer.preallocate()
            if self.step % save_steps == 0 or self.step == total:
                self._save()
        self._save()
        self._finish(is_new=self.step > began_at)
        return Outcome(self.step, self.stopped_by)

    def _take_step(self) -> None:
        """One optimizer step on the next global batch. Re-raises checkpoint writer errors."""
        self.checkpointer.check()
        self._callbacks.before_step()
        began = time.perf_counter()
        rate = set_learning_rate(self.optimizer, self.step + 1, self.config.training)
        batches = self._next_batches()
        rank_loss, targets = self.replica.backward(batches, self._callbacks.before_collective)
        overflowed = self.replica.unscale(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._callbacks.before_collective()
        norm = gathered(get_total_norm(gradients))
        self._callbacks.after_gradients()
        loss_sum = self._sum_and_sync_stop(rank_loss)[0]
        step = Step(
            number=self.step + 1,
            total=self.config.training.total_steps,
            loss=loss_sum / max(1, targets.item()),
            rank_loss=rank_loss.item(),
            grad_norm=norm.item(),
            learning_rate=rate,
            overflowed=overflowed,
            first_window=self.loader.consumed - self.loader.global_batch,
            batches=batches,
            logged=self._is_logged(self.step + 1),
        )
        if not step.is_finite:
            # Every rank has the same numbers, so all stop here, before any weight changes.
            self._callbacks.on_non_finite(step)
            raise non_finite_error(step, self.run_dir, reported=self.config.logging.debug)
        self._callbacks.after_backward(step)
        if step.overflowed:
            log.warning("step %d: skipping the update: gradients overflowed in fp16", step.number)
        else:
            clip_grads_with_norm_(self.model.parameters(), self.config.training.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._callbacks.finish_step(step, time.perf_counter() - began)

    def _next_batches(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch not marked to be skipped."""
        while self.loader.consumed in self._skipped:
            log.warning("skipping the global batch at window %d", self.loader.consumed)
            next(self.loader)
        return next(self.loader)

    def _is_logged(self, step: int) -> bool:
        last = self.config.training.total_steps
        return step % self.config.logging.logging_steps == 0 or step == last

    def _sum_and_sync_stop(self, values: Tensor) -> list[float]:
        """Sum `values` [N] over all ranks; the same reduction shares received stop signals."""
        stops = values.new_tensor(self._stops.as_counts())
        self._callbacks.before_collective()
        numbers: list[float] = self.world.sum(torch.cat([values, stops])).tolist()
        self.stopped_by = received_stop(numbers[len(values) :])
        return numbers[: len(values)]

    def _is_stopped(self) -> bool:
        return self.stopped_by is not None

    def _evaluate(self, split: str) -> None:
        """Record the mean loss of `split` at this step, unless already recorded or split empty.

        A validation interrupted by a signal starts over when the run is resumed.
        """
        name = f"{split}/loss"
        known = self.record is not None and self.record.has(self.step, name)
        if len(self.windows[split]) == 0 or self._is_stopped():
            return
        if self.world.from_main(int(known)):
            return
        self._callbacks.before_pause()
        self.model.eval()
        totals = validate_split(
            self.windows[split],
            self.replica,
            self.world,
            batch_size=self.config.training.batch_size,
            max_windows=self.config.evaluation.max_windows,
            is_stopped=self._check_stop_between_batches,
        )
        if totals is not None:
            sums, targets = totals
            loss = float(sums.sum() / targets.sum().clamp(min=1))
            if not math.isfinite(loss):
                raise NonFiniteError(f"step {self.step}: {name} is {loss}. {REMEDIES}")
            self._callbacks.finish_evaluation(Evaluation(self.step, split, loss, sums, targets))
        self.model.train()

    def _check_stop_between_batches(self) -> bool:
        self._callbacks.before_pause()
        self._sum_and_sync_stop(torch.zeros(0, dtype=torch.float64, device=self.world.device))
        return self._is_stopped()

    def _save(self) -> None:
        """Save this step unless already saved. Re-raises errors of the checkpoint writer."""
        self._callbacks.before_pause()
        seconds = self.checkpointer.save(self._parts.position(self.step, self.loader.consumed))
        if seconds is not None:
            self._callbacks.after_checkpoint(self.step, seconds)

    def _save_before(self, folder: Path, first_window: int) -> None:
        """Save the state before the failed step under `folder`, as a run that starts there."""
        if self._parts.initial_weights is not None and self.world.is_main:
            # A full disk is reported with the checkpoint.
            with contextlib.suppress(UserError):
                record_initial_weights(folder, self._parts.initial_weights)
        self.checkpointer.save_to(folder, self._parts.position(self.step, first_window))

    def _finish(self, *, is_new: bool) -> None:
        """Wait until this step's checkpoint, and the export after the last step, are on disk."""
        self._callbacks.before_pause()
        self.checkpointer.wait()
        is_last = self.step == self.config.training.total_steps
        if is_last and (is_new or not (self.run_dir / MODEL).exists()):
            self.checkpointer.export(self.step)
        # A barrier: torchrun kills the remaining ranks when the first rank of a stopped run exits.
        self.world.from_main(self.step)

    def close(self, status: Status) -> None:
        """Stop the threads; the sinks get a bounded time to flush."""
        with contextlib.ExitStack() as closing:  # the last one first, each whatever others raise
            closing.callback(self._callbacks.on_end, status)
            closing.callback(self.replica.close)
            closing.callback(self.checkpointer.close)
            closing.callback(self.loader.close)
            self._callbacks.before_pause()
