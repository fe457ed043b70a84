"""Saving a training: the copy, the background write, and the export at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from infini_model.data.manifest import TokenizerRecord
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.model.hf import Adapter
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import lock
from infini_model.training.checkpoints.background import HostCopy, Writer
from infini_model.training.checkpoints.checkpoint import (
    Position,
    Snapshot,
    prune_checkpoints,
    save_checkpoint,
    tokens_of,
)
from infini_model.training.checkpoints.export import export_model
from infini_model.training.checkpoints.folders import checkpoint_path, checkpoints_dir
from infini_model.training.parallel.distributed import World

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves a training. Call all methods on all ranks; rank 0, which has `record`, writes."""

    def __init__(
        self,
        run_dir: Path,
        model: InfiniLlama,
        optimizer: torch.optim.Optimizer,
        world: World,
        record: MetricsFile | None,
        *,
        dataset_dir: Path,
        tokenizer: TokenizerRecord,
        adapter: Adapter | None,
        keep: int,
        saved_step: int | None,
    ) -> None:
        """Keeps the `keep` newest checkpoints; the one of `saved_step` already exists.

        `tokenizer` is that of the dataset in `dataset_dir`; `adapter` is what LoRA trains, if so.
        """
        self._run_dir, self._model, self._optimizer = run_dir, model, optimizer
        self._world, self._record, self._keep = world, record, keep
        self._saved_step = saved_step
        self._dataset_dir, self._tokens = dataset_dir, tokens_of(tokenizer)
        self._adapter = adapter
        self._copy, self._writer = HostCopy(world), Writer()

    def check(self) -> None:
        """Re-raise the error of a finished write, without waiting for one in progress."""
        self._writer.check()

    def preallocate(self) -> None:
        """Allocate the host buffers in the background, once the optimizer has its moments."""
        self._writer.start(partial(self._copy.preallocate, self._model, self._optimizer))

    def save(self, position: Position) -> float | None:
        """Copy the state and write it in the background. Re-raises the last write's error.

        Returns the seconds that the training was stalled, or None if the step is already saved.
        """
        if self._saved_step == position.step:
            return None
        began = time.perf_counter()
        self._writer.wait()
        snapshot = self._copy.take(self._model, self._optimizer)
        if self._record is not None:
            self._writer.start(partial(self._write, self._record, snapshot, position))
        self._saved_step = position.step
        return time.perf_counter() - began

    def _write(self, record: MetricsFile, snapshot: Snapshot, position: Position) -> None:
        record.sync()
        path = save_checkpoint(
            self._run_dir, snapshot, position, self._keep, self._tokens, self._adapter
        )
        log.info("Checkpoint saved: %s", path)

    def save_to(self, folder: Path, position: Position) -> None:
        """Write a checkpoint at `position` as a separate run in `folder`; all ranks wait for it.

        A full disk is only logged, so that it does not mask the error being handled.
        """
        self._writer.wait()
        snapshot = self._copy.take(self._model, self._optimizer)
        if self._record is not None:
            try:
                path = save_checkpoint(folder, snapshot, position, 1, self._tokens, self._adapter)
                log.error("Checkpoint saved: %s", path)
            except UserError as error:
                log.error("cannot save the checkpoint: %s", error)  # noqa: TRY400
        self._world.from_main(position.step)

    def wait(self) -> None:
        """Wait until everything is on disk. Re-raises the last write's error."""
        self._writer.wait()

    def export(self, step: int) -> None:
        """Copy the model of a step's checkpoint to `<run>/model`, with its tokenizer, on rank 0.

        Raises `DataError` if the dataset's tokenizer is missing or damaged.
        """
        if self._record is not None:
            prune_checkpoints(self._run_dir, self._keep)
            tokenizer = load_dataset_tokenizer(self._dataset_dir)
            export_model(checkpoint_path(self._run_dir, step), self._run_dir / MODEL, tokenizer)

    def close(self) -> None:
        """Stop the thread once its job is done."""
        self._writer.close()


@contextlib.contextmanager
def only_writer(run_dir: Path, world: World) -> Iterator[None]:
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
