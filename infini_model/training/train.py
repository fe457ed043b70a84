"""The training loop: validate, step, save, until the last step or a signal.

The loss of a step is the sum of all token losses of the global batch divided by the number of
targets, so it does not depend on how the batch is split into processes and micro-batches. A run
that is interrupted and resumed takes bit-identical steps: its state is the weights, the optimizer's
moments, the step and the number of windows seen. Checkpoints are written in the background; no rank
exits before the last one is on disk.

On a GPU the loop does not wait for the step being computed: what a step found is read one step
late, but for a step that is followed by a validation, a checkpoint or the end, and at once with
`logging.debug`, which reports the gradients of a step. So whether an update is taken is decided on
the device. After a NaN no update is, until the host has read of it.
(Masked and block diffusion wait once a micro-batch, to select the masked positions.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from infini_model.config import Config
from infini_model.data.loading.windows import Batch
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.objectives.scoring import bits_per_byte
from infini_model.runtime.errors import NonFiniteError
from infini_model.runtime.processes import deferred_signals
from infini_model.runtime.runs import MODEL, prune_checkpoints, record_last_step, step_key
from infini_model.training.callbacks import Callback, Callbacks, Evaluation, Status, Step
from infini_model.training.distributed import (
    StopSignals,
    World,
    deterministic_algorithms,
    join_world,
    received_stop,
)
from infini_model.training.export import export_model
from infini_model.training.garbage_collection import GarbageCollection
from infini_model.training.launched_step import (
    LaunchedStep,
    copy_to_host,
    peak_bytes,
    recorded_event,
)
from infini_model.training.metrics import (
    Console,
    Recorder,
    SpikeWarning,
    SystemMetrics,
    Utilization,
)
from infini_model.training.nan_report import REMEDIES, NonFiniteReports
from infini_model.training.optimizer import set_learning_rate
from infini_model.training.parallel import TrainModule, full_tensor
from infini_model.training.profiling import Profiler
from infini_model.training.setup import TrainingSetup, build_setup, only_writer
from infini_model.training.source_epochs import SourceEpochs
from infini_model.training.tracking import Exporters
from infini_model.training.validation import EarlyStopping, MemoryReports, validate_split

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
        deferred_signals(deliver=False) as received,
        join_world(config.launch) as world,
        only_writer(run_dir, world),
        contextlib.ExitStack() as stack,
    ):
        if config.launch.deterministic and world.device.type == "cuda":
            stack.enter_context(deterministic_algorithms())
        setup = build_setup(config, dataset_dir, run_dir, world)
        trainer = Trainer(setup, StopSignals(received, world.device), callbacks)
        status: Status = "FAILED"
        try:
            outcome = trainer.run()
            status = "FINISHED" if outcome.stopped_by is None else "KILLED"
        finally:
            trainer.close(status)
        return outcome


def compute_gradients(
    model: TrainModule,
    batches: Sequence[Batch],
    world: World,
    scaler: torch.amp.GradScaler,
) -> tuple[Tensor, Tensor]:
    """Forward and backward: the gradients of the mean loss over the global batch.

    `batches` are this rank's micro-batches. In fp16 the gradients are multiplied by the scale of
    `scaler`.

    Returns:
        The sum of this rank's token losses, [1] float64, and the divisor over all ranks, [] int64:
        the number of targets.
    """
    micro_batches = [model.objective.inputs(batch) for batch in batches]
    counts = torch.stack([inputs.counted.sum() for inputs in micro_batches])
    targets = world.sum(counts.sum())
    # DDP and FSDP average over the ranks.
    scale = (world.size / targets.clamp(min=1)).float()
    total = torch.zeros(1, dtype=torch.float64, device=world.device)
    for index, inputs in enumerate(micro_batches):
        with model.sync(last=index + 1 == len(micro_batches)):
            loss = model(inputs)
            scaler.scale(loss * scale).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total, targets


class Trainer:
    """A training at one step."""

    def __init__(
        self, setup: TrainingSetup, stops: StopSignals, callbacks: Sequence[Callback] = ()
    ) -> None:
        """`callbacks` run before the default ones."""
        self.setup, self._stops = setup, stops
        self.config, self.world, self.run_dir = setup.config, setup.world, setup.run_dir
        self.model, self.optimizer, self.scaler = setup.train_module, setup.optimizer, setup.scaler
        self.loader, self.checkpointer = setup.loader, setup.checkpointer
        self.step = 0 if setup.start is None else setup.start.step
        self.stopped_by: int | None = None
        self._parameters = list(setup.model.parameters())
        # On the device: whether a step since the start was not finite.
        self._failed = torch.zeros((), dtype=torch.bool, device=self.world.device)
        self._unread: LaunchedStep | None = None
        stopping = self.config.training.early_stopping
        self.early_stopping = None if stopping is None else EarlyStopping(stopping, setup)
        self._callbacks = Callbacks([*callbacks, *default_callbacks(self)])
        self._callbacks.call(Callback.attach, self)

    @property
    def reads_late(self) -> bool:
        """Whether the device computes a step while the host launches the next one."""
        return self.world.device.type == "cuda"

    def run(self) -> Outcome:
        """Train to the last step, or until a signal stops it."""
        began_at, is_complete = self.step, False
        self._callbacks.call(Callback.on_start, self.step)
        while not self._is_stopped():
            if self._is_due(self.config.logging.eval_steps):
                self._evaluate("validation")
                is_complete = self._is_last()
            if is_complete:
                self._evaluate("test")
                break
            if not self._is_stopped():
                self._take_step()
                if self.step == began_at + 1:
                    self.checkpointer.preallocate()
            if self._is_due(self.config.checkpoint.save_steps):
                self._save()
        self._save()
        self._finish(is_new=self.step > began_at, is_complete=is_complete)
        return Outcome(self.step, self.stopped_by)

    def _take_step(self) -> None:
        """One optimizer step on the next global batch. Re-raises checkpoint writer errors."""
        self.checkpointer.writer.check()
        self._callbacks.call(Callback.before_step, self.step + 1)
        peak_bytes(self.world.device)  # what was before the step
        began = time.perf_counter()
        after = self._unread.ready if self._unread else recorded_event(self.world.device)
        rate = set_learning_rate(self.optimizer, self.step + 1, self.config.training)
        first_window, wait_seconds, batches = self._next_batches()
        # Of dropout: it follows from the position, so that no random state has to be saved.
        torch.manual_seed(self.config.run.seed + first_window + self.world.rank)
        scale_before = [tensor.clone() for tensor in self.scaler.tensors]

        self.optimizer.zero_grad(set_to_none=True)
        rank_loss, targets = compute_gradients(self.model, batches, self.world, self.scaler)
        overflowed = torch.zeros_like(self._failed)
        if self.scaler.is_enabled():
            overflowed = self.scaler.unscale_and_update(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = full_tensor(get_total_norm(gradients))
        self._callbacks.call(Callback.after_gradients)
        # One reduction sums the loss and shares the stop signals that the ranks have received.
        sums = torch.cat([rank_loss, self._stops.counts()])
        loss = self.world.sum(sums)[0] / targets.clamp(min=1)

        # Every rank has the same numbers. Either optimizer takes no step where `found_inf` is 1.
        self._failed |= ~loss.isfinite() | (~norm.isfinite() & ~overflowed)
        self.optimizer.found_inf = (self._failed | overflowed).float()  # type: ignore[attr-defined]
        # By its norm, the gradients of a failed step would become NaN all over; by 0 they stay.
        norm_to_clip = norm.masked_fill(self._failed, 0.0)
        clip_grads_with_norm_(self._parameters, self.config.training.max_grad_norm, norm_to_clip)
        self.optimizer.step()
        self.step += 1

        self._read()
        self._unread = LaunchedStep(
            make_step=partial(
                Step,
                number=self.step,
                total=self.config.training.total_steps,
                learning_rate=rate,
                first_window=first_window,
                windows_read=self.loader.windows_read,
                wait_seconds=wait_seconds,
                peak_bytes=peak_bytes(self.world.device),
                logged=self._is_due(self.config.logging.logging_steps),
            ),
            numbers=copy_to_host(
                *(targets, loss, rank_loss[0], norm, overflowed),
                *(*sums[1:], *self.scaler.tensors[:1]),
            ),
            scaler=scale_before,
            began=began,
            after=after,
            ready=recorded_event(self.world.device),
        )
        logging, checkpoint = self.config.logging, self.config.checkpoint
        is_last = self._is_due(logging.eval_steps) or self._is_due(checkpoint.save_steps)
        # The next step's gradients replace those that `logging.debug` reports.
        if not self.reads_late or logging.debug or is_last or self._is_stopped():
            self._read()

    def _next_batches(self) -> tuple[int, float, list[Batch]]:
        """Return the windows read before the next step, the wait, and this rank's micro-batches.

        A step takes as many global batches as `training.batch_schedule` says.
        """
        training, waited, batches = self.config.training, 0.0, list[Batch]()
        first = self.loader.windows_read
        for _ in range(training.batches_by(self.step + 1) - training.batches_by(self.step)):
            batches += next(self.loader)
            waited += self.loader.wait_seconds
        return first, waited, batches

    def _read(self) -> None:
        """Read what the last launched step found, and record it, unless that has been done."""
        launched, self._unread = self._unread, None
        if launched is None:
            return
        step, stopped_by = launched.read()
        self.stopped_by = self.stopped_by or stopped_by
        if not step.is_finite:
            self.scaler.restore(launched.scaler)
            self._callbacks.call(Callback.on_non_finite, step)
            more = "; set logging.debug=true to list the affected tensors"
            raise NonFiniteError(
                f"step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}; the step "
                f"was not taken. {REMEDIES}{'' if self.config.logging.debug else more}"
            )
        if step.overflowed:
            log.warning("step %d: skipping the update: gradients overflowed in fp16", step.number)
        self._callbacks.finish_step(step)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.training.total_steps

    def _is_last(self) -> bool:
        """Return True if the training ends with this step, which has been validated."""
        if self.step == self.config.training.total_steps:
            return True
        return self.early_stopping is not None and self.early_stopping.ends(self.step)

    def _is_stopped(self) -> bool:
        return self.stopped_by is not None

    def _evaluate(self, split: str) -> None:
        """Record the mean loss of `split` at this step, unless already recorded or split empty.

        A validation interrupted by a signal starts over when the run is resumed.
        """
        name, record = f"{split}/loss", self.setup.record
        if len(self.setup.windows(split)) == 0 or self._is_stopped():
            return
        if self.world.broadcast(lambda: bool(record and record.has(self.step, name))):
            return
        self.expect_long_work()
        self.setup.model.eval()
        totals = validate_split(self.setup, split, self.check_stop)
        if totals is not None:
            windows = self.setup.windows(split)
            sums, targets, sizes = windows.add_sources(totals, self.config.evaluation.max_windows)
            loss = float(sums.sum() / targets.sum().clamp(min=1))
            if not math.isfinite(loss):
                raise NonFiniteError(f"step {self.step}: {name} is {loss}. {REMEDIES}")
            scored = zip(windows.sources, totals.sum(2).tolist(), strict=True)
            by_source = {n: total / count for n, (total, count, _) in scored if n and count}
            bits = bits_per_byte(float(sums.sum()), float(sizes.sum()))
            self._callbacks.finish_evaluation(
                Evaluation(self.step, split, loss, bits, by_source), self._is_stopped
            )
        self.setup.model.train()

    def check_stop(self) -> bool:
        """Agree between batches of an evaluation, on all ranks, whether a signal ends the run."""
        self.expect_long_work()
        counts = self.world.sum(self._stops.counts().clone())
        self.stopped_by = received_stop(counts.tolist())
        return self._is_stopped()

    def _save(self) -> None:
        """Save this step unless already saved. Re-raises errors of the checkpoint writer."""
        self.expect_long_work()
        state = self.setup.state(self.step, self.loader.windows_read)
        seconds = self.checkpointer.save(state)
        if seconds is not None:
            self._callbacks.call(Callback.after_checkpoint, self.step, seconds)

    def expect_long_work(self) -> None:
        """Tell the callbacks that something may take much longer than a step."""
        self._callbacks.call(Callback.expect_long_work)

    def _finish(self, *, is_new: bool, is_complete: bool) -> None:
        """Wait until this step's checkpoint, and the export after the last step, are on disk."""
        self.expect_long_work()
        self.checkpointer.writer.wait()
        if self.world.is_main and is_complete:
            record_last_step(self.run_dir, self.step)
        if self.world.is_main and is_complete and (is_new or not (self.run_dir / MODEL).exists()):
            prune_checkpoints(self.run_dir, self.config.checkpoint.save_total_limit)
            tokenizer = load_dataset_tokenizer(self.setup.dataset_dir)
            export_model(self.run_dir / step_key(self.step), self.run_dir / MODEL, tokenizer)
        # torchrun kills the remaining ranks when the first rank of a stopped run exits.
        self.world.barrier()

    def close(self, status: Status) -> None:
        """Stop the threads; the exporters get a bounded time to flush."""
        with contextlib.ExitStack() as closing:  # the last one first, each whatever others raise
            closing.callback(self._callbacks.end, status)
            closing.callback(self.model.close)
            closing.callback(self.checkpointer.writer.close)
            closing.callback(self.loader.close)
            self.expect_long_work()


def default_callbacks(trainer: Trainer) -> list[Callback]:
    """The callbacks of a rank, in the order in which they are called."""
    setup = trainer.setup
    callbacks: list[Callback] = [GarbageCollection()]
    if setup.record is not None:
        callbacks += [
            Recorder(setup.record, setup.config.packing.context_length),
            Exporters(setup.run_dir, setup.config, setup.dataset),
            SystemMetrics(),
            SpikeWarning(),
        ]
    callbacks += [MemoryReports(setup), SourceEpochs(setup), Utilization(setup), Console(setup)]
    if trainer.early_stopping is not None:
        callbacks.append(trainer.early_stopping)
    if (profile := setup.config.logging.profile) is not None:
        callbacks.append(Profiler(profile, setup, trainer.expect_long_work))
    if setup.config.logging.debug:
        callbacks.append(NonFiniteReports(setup, trainer.expect_long_work))
    return callbacks
