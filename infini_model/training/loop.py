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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from infini_model.config import Config
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import Batch, open_windows
from infini_model.data.manifest import Manifest, read_manifest
from infini_model.objectives import make_objective
from infini_model.runtime.errors import NonFiniteError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import record_last_step
from infini_model.runtime.storage import lock
from infini_model.training.banner import log_banner, log_rank
from infini_model.training.callbacks.callback import Callback, Callbacks, Step
from infini_model.training.callbacks.defaults import Training, default_callbacks
from infini_model.training.callbacks.diagnostics import REMEDIES
from infini_model.training.callbacks.mlflow_record import Status, read_mlflow_record
from infini_model.training.checkpoints.background import set_generator_states
from infini_model.training.checkpoints.checkpoint import (
    Position,
    checkpoints_dir,
    load_generators,
    load_optimizer,
)
from infini_model.training.checkpoints.saving import Checkpointer
from infini_model.training.launch.recovery import read_recovery
from infini_model.training.optimizer import make_optimizer, set_learning_rate
from infini_model.training.parallel.distributed import (
    StopSignals,
    World,
    join_world,
    received_stop,
    use_deterministic_algorithms,
)
from infini_model.training.parallel.sharding import gathered
from infini_model.training.replica import Replica
from infini_model.training.setup import (
    Start,
    divide,
    find_start,
    place_model,
    record_settings,
    with_steps,
    with_vocabulary,
)
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
        join_world(config.launch.gpus) as world,
        _only_writer(run_dir, world),
    ):
        if config.launch.deterministic and world.device.type == "cuda":
            use_deterministic_algorithms()
        trainer = Trainer(config, dataset_dir, run_dir, world, stops, callbacks)
        status: Status = "FAILED"
        try:
            outcome = trainer.run()
            status = "FINISHED" if outcome.stopped_by is None else "KILLED"
        finally:
            trainer.close(status)
        return outcome


@contextlib.contextmanager
def _only_writer(run_dir: Path, world: World) -> Iterator[None]:
    """Hold the run folder's lock, waiting for any other training in it to end."""
    if not world.is_main:
        yield
        return
    path = checkpoints_dir(run_dir) / ".lock"
    with lock(path, wait=False) as free:
        if free:
            yield
            return
    log.warning("waiting for another process that is training in %s", run_dir)
    with lock(path):
        yield


class Trainer:
    """The state of a training: the model, the optimizer, the step and the data loader."""

    def __init__(
        self,
        config: Config,
        dataset_dir: Path,
        run_dir: Path,
        world: World,
        stops: StopSignals,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Start at step 0 or from the newest checkpoint. Raises as `train` does."""
        self.run_dir, self.world, self._stops = run_dir, world, stops
        self.stopped_by: int | None = None
        manifest = read_manifest(dataset_dir)
        self._dataset_key = manifest.key
        config = with_vocabulary(config, manifest.tokenizer.vocab_size, dataset_dir)
        self._windows = {
            split: open_windows(dataset_dir, split, config.packing, config.model.segment_length)
            for split in ("train", "validation", "test")
        }
        start = find_start(run_dir, config, manifest.key, world)
        self.step = start.step
        self._division = divide(config.training, world.size, start.global_batch)
        windows = self._windows["train"]
        self.config = with_steps(config, len(windows), self._division.global_batch)
        self._build_model(start)
        self._loader = Loader(
            windows,
            batch_size=self._division.micro_batch,
            gradient_accumulation_steps=self._division.accumulation,
            rank=world.rank,
            world_size=world.size,
            seed=config.run.seed,
            consumed=start.consumed,
            device=world.device,
        )
        self._skipped = read_recovery(run_dir).skipped
        self._record: MetricsFile | None = None
        if world.is_main:
            record_settings(run_dir, config)
            record_last_step(run_dir, self.config.training.total_steps)
            self._record = MetricsFile(run_dir, start.saved_step)
        self._checkpointer = Checkpointer(
            run_dir,
            self.model,
            self.optimizer,
            world,
            self._record,
            keep=config.checkpoint.save_total_limit,
            saved_step=start.saved_step,
        )
        training = self._as_training(dataset_dir, manifest)
        self._callbacks = Callbacks([*callbacks, *default_callbacks(training)])
        log_rank(world)
        if world.is_main:
            log_banner(training, self._division, start.checkpoint, self._windows)

    def _build_model(self, start: Start) -> None:
        """Create the model and the optimizer, restored from the checkpoint if there is one."""
        objective = make_objective(self.config)
        module = place_model(self.config, objective, start.checkpoint, self.world)
        self.model = module.model
        self.optimizer = make_optimizer(self.model, self.config.training)
        if start.checkpoint is not None:
            load_optimizer(start.checkpoint, self.model, self.optimizer)
            set_generator_states(load_generators(start.checkpoint), self.world)
        self._replica = Replica(module, self.config, self.world)
        self._replica.load_scaler(start.scaler)

    def _as_training(self, dataset_dir: Path, manifest: Manifest) -> Training:
        """The parts of this training that callbacks may use."""
        return Training(
            config=self.config,
            dataset_dir=dataset_dir,
            run_dir=self.run_dir,
            manifest=manifest,
            world=self.world,
            step=self.step,
            model=self.model,
            replica=self._replica,
            loader=self._loader,
            record=self._record,
            before_pause=lambda: self._callbacks.before_pause(),
            save_before=self._save_before,
        )

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
                    self._checkpointer.preallocate()
            if self.step % save_steps == 0 or self.step == total:
                self._save()
        self._save()
        self._finish(is_new=self.step > began_at)
        return Outcome(self.step, self.stopped_by)

    def _take_step(self) -> None:
        """One optimizer step on the next global batch. Re-raises checkpoint writer errors."""
        self._checkpointer.check()
        self._callbacks.before_step()
        began = time.perf_counter()
        rate = set_learning_rate(self.optimizer, self.step + 1, self.config.training)
        batches = self._next_batches()
        rank_loss, targets = self._replica.backward(batches)
        overflowed = self._replica.unscale(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = gathered(get_total_norm(gradients))
        loss_sum = self._sum_and_sync_stop(rank_loss.clone())[0]
        step = Step(
            number=self.step + 1,
            total=self.config.training.total_steps,
            loss=loss_sum / max(1, targets.item()),
            rank_loss=rank_loss.item(),
            grad_norm=norm.item(),
            learning_rate=rate,
            overflowed=overflowed,
            first_window=self._loader.consumed - self._loader.global_batch,
            batches=batches,
            logged=self._is_logged(self.step + 1),
        )
        if not step.is_finite:
            # Every rank has the same numbers, so all stop here, before any weight changes.
            self._callbacks.on_non_finite(step)
            raise self._non_finite(step)
        self._callbacks.after_backward(step)
        if step.overflowed:
            log.warning("step %d: skipping the update: gradients overflowed in fp16", step.number)
        else:
            clip_grads_with_norm_(self.model.parameters(), self.config.training.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._callbacks.after_step(step, time.perf_counter() - began)

    def _next_batches(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch not marked to be skipped."""
        while self._loader.consumed in self._skipped:
            log.warning("skipping the global batch at window %d", self._loader.consumed)
            next(self._loader)
        return next(self._loader)

    def _is_logged(self, step: int) -> bool:
        last = self.config.training.total_steps
        return step % self.config.logging.logging_steps == 0 or step == last

    def _sum_and_sync_stop(self, values: Tensor) -> list[float]:
        """Sum `values` [N] over all ranks; the same reduction shares received stop signals."""
        stops = values.new_tensor(self._stops.as_counts())
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
        known = self._record is not None and self._record.has(self.step, name)
        if len(self._windows[split]) == 0 or self._is_stopped():
            return
        if self.world.from_main(int(known)):
            return
        self._callbacks.before_pause()
        self.model.eval()
        loss = validate_split(
            self._windows[split],
            self._replica,
            self.world,
            batch_size=self.config.training.batch_size,
            max_windows=self.config.evaluation.max_windows,
            is_stopped=self._check_stop_between_batches,
        )
        self.model.train()
        if loss is None:
            return
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.step}: {name} is {loss}. {REMEDIES}")
        self._callbacks.after_evaluation(self.step, split, loss)

    def _check_stop_between_batches(self) -> bool:
        self._callbacks.before_pause()
        self._sum_and_sync_stop(torch.zeros(0, dtype=torch.float64, device=self.world.device))
        return self._is_stopped()

    def _save(self) -> None:
        """Save this step unless already saved. Re-raises errors of the checkpoint writer."""
        self._callbacks.before_pause()
        seconds = self._checkpointer.save(self._position(self._loader.consumed))
        if seconds is not None:
            self._callbacks.after_checkpoint(self.step, seconds)

    def _save_before(self, folder: Path, first_window: int) -> None:
        """Save the state before the failed step under `folder`, as a run that starts there."""
        self._checkpointer.save_to(folder, self._position(first_window))

    def _position(self, consumed: int) -> Position:
        """The position at the current step, with `consumed` windows read."""
        return Position(
            step=self.step,
            consumed=consumed,
            seed=self.config.run.seed,
            world_size=self.world.size,
            dataset_key=self._dataset_key,
            mlflow_run_id=read_mlflow_record(self.run_dir).get("run_id"),
            config=self.config.model_dump(mode="json"),
            precision=self._replica.precision.name,
            global_batch=self._division.global_batch,
            scaler=self._replica.scaler_state,
        )

    def _finish(self, *, is_new: bool) -> None:
        """Wait until this step's checkpoint, and the export after the last step, are on disk."""
        self._callbacks.before_pause()
        self._checkpointer.wait()
        is_last = self.step == self.config.training.total_steps
        if is_last and (is_new or not (self.run_dir / "model").exists()):
            self._checkpointer.export(self.step)
        # A barrier: torchrun kills the remaining ranks when the first rank of a stopped run exits.
        self.world.from_main(self.step)

    def _non_finite(self, step: Step) -> NonFiniteError:
        message = (
            f"step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}; "
            f"the step was not taken. {REMEDIES}"
        )
        advice = "set logging.debug=true to list the affected tensors"
        if self.config.logging.debug:
            advice = f"the report is in {self.run_dir / 'debug' / f'step-{step.number}'}"
        return NonFiniteError(f"{message}; {advice}", step.first_window)

    def close(self, status: Status) -> None:
        """Stop the threads; the sinks get a bounded time to flush."""
        self._callbacks.before_pause()
        self._loader.close()
        self._checkpointer.close()
        self._replica.close()
        self._callbacks.on_end(status)
