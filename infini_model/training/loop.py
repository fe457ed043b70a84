"""The story of a training: validate, step, save, until the last step or a signal.

The loss of a step is the sum of all token losses of the global batch over the number of its
targets, wherever these lie: it does not depend on how the batch is cut into processes and
micro-batches. A training that is interrupted anywhere and resumed takes the same steps to the bit,
since its state is the weights, AdamW's moments, the step and the number of windows consumed.
Checkpoints are written in the background; no rank ends before the last one is on the disk.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from infini_model.config import Config
from infini_model.data.loading.loader import Batch, Loader, open_windows, validation_batches
from infini_model.data.manifest import read_manifest
from infini_model.runtime.errors import NonFiniteError, UserError
from infini_model.runtime.runs import record_last_step
from infini_model.runtime.stage_protocol import OnProgress
from infini_model.runtime.storage import lock
from infini_model.training.callbacks import heartbeat
from infini_model.training.callbacks.diagnostics import (
    REMEDIES,
    NonFinite,
    report_non_finite,
    report_spike,
)
from infini_model.training.callbacks.flops import Utilization
from infini_model.training.callbacks.metrics import Metrics
from infini_model.training.callbacks.mlflow_record import Status
from infini_model.training.callbacks.provenance import Attribution
from infini_model.training.callbacks.spikes import SpikeDetector, past_losses
from infini_model.training.checkpoints.background import HostCopy, Writer, set_generator_states
from infini_model.training.checkpoints.checkpoint import (
    Position,
    Snapshot,
    checkpoint_path,
    checkpoints_dir,
    export_model,
    load_generators,
    load_optimizer,
    prune_checkpoints,
    read_position,
    save_checkpoint,
)
from infini_model.training.launch.recovery import read_recovery
from infini_model.training.optimizer import make_optimizer, set_learning_rate
from infini_model.training.parallel.distributed import (
    StopSignals,
    World,
    add_up_in_order,
    join_world,
    stop_of,
)
from infini_model.training.parallel.sharding import whole
from infini_model.training.replica import Replica
from infini_model.training.setup import (
    check_same_run,
    choose_checkpoint,
    divide,
    place_model,
    record_settings,
    with_steps,
    with_vocabulary,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a training ended: at `step`, done, or stopped by a signal with that step saved."""

    step: int
    stopped_by: int | None


def train(
    config: Config, dataset_dir: Path, run_dir: Path, *, report_progress: OnProgress | None = None
) -> Outcome:
    """Train in this process and, under torchrun, in the others that it started.

    Goes on from the newest complete checkpoint in `run_dir`, if there is one. `report_progress` is
    called on rank 0 after every step, with the step and the number of steps in all.

    Raises:
        UserError: The settings do not fit the dataset or the run, or a folder cannot be written.
        NonFiniteError: The loss or a gradient is NaN or infinite; nothing was overwritten.
    """
    with (
        StopSignals() as stops,
        join_world(config.launch.gpus) as world,
        _only_writer(run_dir, world),
    ):
        if config.launch.deterministic and world.device.type == "cuda":
            add_up_in_order()
        trainer = Trainer(config, dataset_dir, run_dir, world, stops)
        trainer.report_progress = report_progress if world.is_main else None
        status: Status = "FAILED"
        try:
            outcome = trainer.run()
            status = "FINISHED" if outcome.stopped_by is None else "KILLED"
        finally:
            trainer.close(status)
        return outcome


@contextlib.contextmanager
def _only_writer(run_dir: Path, world: World) -> Iterator[None]:
    """Keep a second training out of the run folder until the first has ended."""
    if not world.is_main:
        yield
        return
    path = checkpoints_dir(run_dir) / ".lock"
    with lock(path, wait=False) as free:
        if free:
            yield
            return
    log.warning("waiting for another process that trains in %s", run_dir)
    with lock(path):
        yield


class Trainer:
    """A training at one point of its way: the model, where it stands, and what it reads."""

    report_progress: OnProgress | None = None

    def __init__(
        self, config: Config, dataset_dir: Path, run_dir: Path, world: World, stops: StopSignals
    ) -> None:
        """Begin at step 0, or where the newest checkpoint stands. Raises as `train` does."""
        manifest = read_manifest(dataset_dir)
        self.config = with_vocabulary(config, manifest.tokenizer.vocab_size, dataset_dir)
        self.run_dir, self.world, self.dataset_key = run_dir, world, manifest.key
        self._stops = stops
        self.stopped_by: int | None = None
        self._windows = {
            split: open_windows(dataset_dir, split, config.packing, config.model.segment_length)
            for split in ("train", "validation", "test")
        }
        self._copy, self._writer = HostCopy(world), Writer()
        self._stalled: float | None = None
        checkpoint = choose_checkpoint(run_dir, world)
        consumed = self._build(checkpoint)
        self._settings = self.config.model_dump(mode="json")
        self._saved_step = self.step if checkpoint else None
        self._loader = Loader(
            self._windows["train"],
            batch_size=self._division.micro_batch,
            gradient_accumulation_steps=self._division.accumulation,
            rank=world.rank,
            world_size=world.size,
            seed=config.run.seed,
            consumed=consumed,
            device=world.device,
        )
        self._skipped = read_recovery(run_dir).skipped
        self._attribution = Attribution(dataset_dir, self._loader, self._replica)
        self._spikes = SpikeDetector(past_losses(run_dir, self.step, world))
        self._utilization = Utilization(
            self.model,
            config.packing.context_length,
            world.device,
            self._replica.precision,
            world.size,
        )
        self._metrics: Metrics | None = None
        if world.is_main:
            record_settings(run_dir, config)
            record_last_step(run_dir, self.config.training.total_steps)
            dataset = {
                "name": manifest.name,
                "key": manifest.key,
                "path": str(dataset_dir.resolve()),
            }
            self._metrics = Metrics(run_dir, self.config, dataset, self._saved_step)
            self._announce(manifest.folder_name, checkpoint)

    def _build(self, checkpoint: Path | None) -> int:
        """Make the model and the optimizer; returns the windows that were read already."""
        training = self.config.training
        consumed = self.step = 0
        global_batch = scaler = None
        if checkpoint is not None:
            position = read_position(checkpoint)
            check_same_run(checkpoint, position, self.config, self.dataset_key)
            consumed, self.step = position.consumed, position.step
            global_batch, scaler = position.global_batch, position.scaler
        self._division = divide(training, self.world.size, global_batch)
        windows = len(self._windows["train"])
        self.config = with_steps(self.config, windows, self._division.global_batch)
        self.model = place_model(self.config, checkpoint, self.world)
        self.optimizer = make_optimizer(self.model, training)
        if checkpoint is not None:
            load_optimizer(checkpoint, self.model, self.optimizer)
            set_generator_states(load_generators(checkpoint), self.world)
        self._replica = Replica(self.model, self.config, self.world)
        self._replica.load_scaler(scaler)
        return consumed

    def run(self) -> Outcome:
        """Train to the last step, or to the signal that stops it."""
        training, checkpoint = self.config.training, self.config.checkpoint
        eval_steps = self.config.logging.eval_steps
        self._began, self._began_at = time.monotonic(), self.step
        while not self._is_stopped():
            if self.step % eval_steps == 0 or self.step == training.total_steps:
                self._evaluate("validation")
            if self.step == training.total_steps:
                self._evaluate("test")
                break
            if not self._is_stopped():
                self._take_step()
                if self.report_progress is not None:
                    self.report_progress(self.step, training.total_steps)
                if self.step == self._began_at + 1:
                    self._writer.start(partial(self._copy.make_room, self.model, self.optimizer))
            if self.step % checkpoint.save_steps == 0 or self.step == training.total_steps:
                self._save()
        self._save()
        self._finish()
        return Outcome(self.step, self.stopped_by)

    def _take_step(self) -> None:
        """One optimizer step on the next global batch. Raises what writing a checkpoint raised."""
        self._writer.check()
        began = time.perf_counter()
        rate = set_learning_rate(self.optimizer, self.step + 1, self.config.training)
        while self._loader.consumed in self._skipped:
            log.warning("the global batch at window %d is passed over", self._loader.consumed)
            next(self._loader)
        batches = next(self._loader)
        loss_sum, targets = self._replica.backward(batches)
        overflowed = self._replica.unscale(self.optimizer)
        rank_loss = loss_sum.clone()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm(gradients))
        heartbeat.beat()
        loss = self._sum_and_hear(loss_sum)[0] / max(1, targets.item())
        grad_norm = norm.item()
        skipped = overflowed and (self._replica.loss_scale or 0.0) >= 1.0
        if not (math.isfinite(loss) and (math.isfinite(grad_norm) or skipped)):
            # Every rank sees the same two numbers, so all of them stop here, before any weight.
            event = NonFinite(self.step + 1, self.world.rank, loss, rank_loss.item(), grad_norm)
            raise self._non_finite(event, batches)
        if spike := self._spikes.watch(loss):
            heartbeat.rest()
            reads = self._attribution.read_back(batches)
            report_spike(self.run_dir, self.step + 1, self.world.rank, spike, reads)
        if skipped:
            log.warning("step %d: gradients overflowed in fp16; it is skipped", self.step + 1)
        else:
            clip_grads_with_norm_(self.model.parameters(), self.config.training.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._record(loss, rate, grad_norm, time.perf_counter() - began)

    def _sum_and_hear(self, values: Tensor) -> list[float]:
        """`values` [N] summed over all ranks, who learn on the way if one was told to stop."""
        heard = values.new_tensor(self._stops.as_counts())
        numbers: list[float] = self.world.sum(torch.cat([values, heard])).tolist()
        self.stopped_by = stop_of(numbers[len(values) :])
        return numbers[: len(values)]

    def _is_stopped(self) -> bool:
        return self.stopped_by is not None

    def _evaluate(self, split: str) -> None:
        """Record the mean loss over the targets of `split` at this step, unless that was done."""
        windows, name = self._windows[split], f"{split}/loss"
        known = self._metrics is not None and self._metrics.has(self.step, name)
        if len(windows) == 0 or self._is_stopped() or self.world.from_main(int(known)):
            return
        training, world = self.config.training, self.world
        totals = torch.zeros(2, dtype=torch.float64, device=world.device)
        batches = validation_batches(
            windows, training.batch_size, world.rank, world.size, self._windows_to_score()
        )
        self.model.eval()
        for batch in batches:
            heartbeat.rest()
            totals += self._replica.score(batch.to(world.device))
            self._sum_and_hear(totals[:0])
            if self._is_stopped():
                # It is done from the start when the training is resumed.
                return
        self.model.train()
        loss_sum, targets = world.sum(totals).tolist()
        loss = loss_sum / max(1.0, targets)
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.step}: {name} is {loss}. {REMEDIES}")
        if self._metrics is not None:
            self._metrics.append(self.step, {name: loss})
            log.info("[GPU 0] Step [%d/%d] | %s: %.4f", self.step, training.total_steps, name, loss)

    def _windows_to_score(self) -> int | None:
        """At most so many in one validation, however many processes share them; None is all."""
        batches = self.config.logging.eval_batches
        if batches is None:
            return None
        accumulation = self.config.training.gradient_accumulation_steps
        at_once = self._division.global_batch // accumulation
        return batches * max(1, at_once)

    def _record(self, loss: float, rate: float, grad_norm: float, seconds: float) -> None:
        """Log the step that was just taken."""
        training, every = self.config.training, self.config.logging.logging_steps
        shown = self.step % every == 0 or self.step == training.total_steps
        if shown:
            log.info(
                "[GPU %d] Step [%d/%d] | Loss: %.4f | LR: %.2e | Grad Norm: %.4f | Epoch: %.2f | "
                "ETA: %s",
                *(self.world.rank, self.step, training.total_steps, loss, rate, grad_norm),
                *(self._loader.consumed / len(self._windows["train"]), self._time_left()),
            )
        gates = self.model.gate_statistics(whole) if shown else []
        if self._metrics is None:
            return
        tokens = self._loader.global_batch * self.config.packing.context_length
        values = {
            "train/loss": loss,
            "train/learning_rate": rate,
            "train/tokens_per_second": tokens / seconds,
            "train/step_seconds": seconds,
            "train/data_wait_seconds": self._loader.wait_seconds,
            **self._utilization.metrics(tokens / seconds),
        }
        if self._replica.loss_scale is not None:
            values["train/loss_scale"] = self._replica.loss_scale
        if math.isfinite(grad_norm):
            values["train/grad_norm"] = grad_norm
        else:
            values["train/skipped_steps"] = 1.0
        if self._stalled is not None:
            # Between the step before and this one.
            values["checkpoint/stall_seconds"] = self._stalled
            self._stalled = None
        if shown:
            values |= self._metrics.system
        for layer, gate in enumerate(gates):
            values |= {
                f"memory/layer_{layer}/gate_mean": gate.mean,
                f"memory/layer_{layer}/gate_min": gate.minimum,
                f"memory/layer_{layer}/gate_max": gate.maximum,
            }
        self._metrics.append(self.step, values)

    def _time_left(self) -> str:
        """At the pace so far, validation and checkpoints included: 5:30 or 1:05:30."""
        pace = (time.monotonic() - self._began) / (self.step - self._began_at)
        minutes, seconds = divmod(round(pace * (self.config.training.total_steps - self.step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _save(self) -> None:
        """Copy what a checkpoint of this step holds, unless there is one; a thread writes it.

        Raises what writing the one before raised.
        """
        if self._saved_step == self.step:
            return
        heartbeat.rest()
        began = time.perf_counter()
        self._writer.wait()
        snapshot = self._copy.take(self.model, self.optimizer)
        if self._metrics is not None:
            position = self._position(self._metrics, self._loader.consumed)
            self._writer.start(partial(self._write, self._metrics, snapshot, position))
        self._saved_step = self.step
        self._stalled = time.perf_counter() - began

    def _position(self, metrics: Metrics, consumed: int) -> Position:
        """Where the training stands after so many windows."""
        return Position(
            step=self.step,
            consumed=consumed,
            seed=self.config.run.seed,
            world_size=self.world.size,
            dataset_key=self.dataset_key,
            mlflow_run_id=metrics.mlflow_run_id,
            config=self._settings,
            precision=self._replica.precision,
            global_batch=self._division.global_batch,
            scaler=self._replica.scaler_state,
        )

    def _write(self, metrics: Metrics, snapshot: Snapshot, position: Position) -> None:
        """Write a checkpoint; in the writer's thread."""
        metrics.sync()
        keep = self.config.checkpoint.save_total_limit
        path = save_checkpoint(self.run_dir, snapshot, position, keep)
        log.info("Checkpoint saved: %s", path)

    def _finish(self) -> None:
        """Return when this step's checkpoint is on the disk and, after the last one, the export."""
        heartbeat.rest()
        self._writer.wait()
        training, model = self.config.training, self.run_dir / "model"
        new = self.step > self._began_at or not model.exists()
        if self.world.is_main and self.step == training.total_steps and new:
            prune_checkpoints(self.run_dir, self.config.checkpoint.save_total_limit)
            export_model(checkpoint_path(self.run_dir, self.step), model)
        # The others wait here: torchrun ends all when the first one of a stopped training ends.
        self.world.from_main(self.step)

    def _non_finite(self, event: NonFinite, batches: list[Batch]) -> NonFiniteError:
        """The error to raise; in debug mode the report is printed and saved first."""
        heartbeat.rest()
        before = self._loader.consumed - self._loader.global_batch
        message = (
            f"step {event.step}: loss {event.loss}, gradient norm {event.grad_norm}; "
            f"the step was not taken. {REMEDIES}"
        )
        if not self.config.logging.debug:
            advice = "logging.debug=true names the tensors at fault"
            return NonFiniteError(f"{message}; {advice}", before)
        reads = self._attribution.read_back(batches)
        folder = report_non_finite(self.run_dir, event, self.model, batches, reads)
        self._save_apart(folder)
        return NonFiniteError(f"{message}; the report is in {folder}", before)

    def _save_apart(self, folder: Path) -> None:
        """Write where the step that was not taken began, as a run of its own that begins with it.

        All ranks wait until it is written, or until it is told why it is not.
        """
        self._writer.wait()
        snapshot = self._copy.take(self.model, self.optimizer)
        if self._metrics is not None:
            began_at = self._loader.consumed - self._loader.global_batch
            position = self._position(self._metrics, began_at)
            try:
                log.error("Checkpoint saved: %s", save_checkpoint(folder, snapshot, position, 1))
            except UserError as error:
                log.error("the checkpoint is not saved: %s", error)  # noqa: TRY400
        self.world.from_main(self.step)

    def _announce(self, dataset: str, checkpoint: Path | None) -> None:
        """Print what is about to be done, in totals."""
        training, world, division = self.config.training, self.world, self._division
        windows = division.global_batch
        tokens, trained = windows * self.config.packing.context_length, len(self._windows["train"])
        parameters = sum(p.numel() for p in self.model.parameters())
        rule = "=" * 46
        for line in (
            rule,
            f"Run: {self.run_dir}",
            f"Dataset: {dataset}",
            f"Device: {world.device.type}, {self._replica.precision}",
            f"Attention inside segments: {self._replica.attention_backend}",
            f"Number of processes: {world.size}, {self.config.launch.strategy}",
            f"Batch size per process: {division.micro_batch}",
            f"Gradient accumulation: {division.accumulation}",
            f"Total batch size: {windows} windows, {tokens:,} tokens a step",
            f"Model parameters: {parameters:,}",
            f"Vocabulary size: {self.config.model.vocab_size}",
            f"Resuming from: {checkpoint}" if checkpoint else f"Seed: {self.config.run.seed}",
            f"Steps: {self.step} of {training.total_steps} done",
            f"Epochs: {training.total_steps * windows / trained:.2f} of {trained:,} windows",
            rule,
        ):
            log.info("%s", line)
        for split in ("validation", "test"):
            if len(self._windows[split]) == 0:
                log.warning("%s: too few tokens for one window; no %s loss", dataset, split)

    def close(self, status: Status) -> None:
        """End the threads; the sinks get a bounded time to take what is left."""
        heartbeat.rest()
        self._loader.close()
        self._writer.close()
        self._replica.close()
        if self._metrics is not None:
            self._metrics.close(status)
