"""The subject of evaluation tasks: a trained model and a dataset's held-out splits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from infini_model.config import Config
from infini_model.data.loading.windows import (
    Batch,
    Windows,
    open_windows,
    sample_windows,
    validation_batches,
)
from infini_model.data.manifest import Manifest, Split, read_manifest
from infini_model.evaluation.cells import Cells
from infini_model.evaluation.score import EMPTY, Score
from infini_model.model.inspection.memory_use import MemoryUse
from infini_model.model.precision import resolve_precision
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import MANIFEST, content_key, sha256
from infini_model.training.checkpoint import newest_checkpoint, read_state
from infini_model.training.export import load_model
from infini_model.training.launch.devices import first_device

# To be raised when a task measures differently, so that no older cell is taken for a new one.
CELLS_VERSION = 1
HELD_OUT: tuple[Split, ...] = ("validation", "test")

log = logging.getLogger(__name__)


class Pass(NamedTuple):
    """A pass over the sample of a split; `empty_memory` empties it before every segment."""

    split: Split
    empty_memory: bool = False


class Subject:
    """The newest checkpoint of a run and the held-out splits, scored as in training.

    Attributes:
        checkpoint: Folder of the checkpoint.
        position: The training state of the checkpoint.
        model: The model in eval mode, on the device of `launch.gpus`.
        manifest: The dataset's manifest.
        precision: That of the training, in which losses are computed and texts generated.
        on_windows: Called after each scored batch with its number of windows.
    """

    def __init__(self, run_dir: Path, dataset_dir: Path, config: Config) -> None:
        """Load the model.

        Raises:
            CheckpointError: There is no checkpoint, or its vocabulary is too small.
            ConfigError: The weights of a LoRA run are gone.
            DataError: The folder is not a dataset, or is damaged.
            DeviceError: As `load_model`.
        """
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None:
            raise CheckpointError(f"{run_dir / 'checkpoints'}: no checkpoint found; train first")
        self.run_dir, self.dataset_dir, self.config = run_dir, dataset_dir, config
        self.checkpoint, self.position = checkpoint, read_state(checkpoint)
        self.manifest: Manifest = read_manifest(dataset_dir)
        device = first_device(config.launch.gpus)
        self.model = load_model(
            checkpoint / MODEL,
            device=device,
            attention_backend=config.launch.attention_backend,
        )
        self._check_vocabulary()
        precision = resolve_precision(config.training.precision, torch.device(device))
        trained = config.updated(model=self.model.config)
        module = LossModule(self.model, make_objective(trained))
        self.precision = self.model.precision = precision
        self._scorer = Scorer(module, precision, torch.device(device))
        self._windows: dict[Split, Windows] = {
            split: open_windows(
                dataset_dir, split, config.packing, self.model.config.segment_length
            )
            for split in HELD_OUT
            if self.manifest.splits[split].tokens
        }
        self._scores: dict[Pass, Score] = {}
        self.on_windows: Callable[[int], None] = lambda windows: None  # noqa: ARG005

    def sample_size(self, split: Split) -> int:
        """Number of windows of a split that are scored."""
        if split not in self._windows:
            return 0
        return len(sample_windows(len(self._windows[split]), self.config.evaluation.max_windows))

    def score(self, split: Split, *, empty_memory: bool = False) -> Score:
        """The score of a split, cached.

        `empty_memory` empties the memory before every segment. Raises `CheckpointError` if the loss
        is not finite.
        """
        if not self.sample_size(split):
            log.warning(
                "%s: split %s is too small for one window; not scored", self.dataset_dir, split
            )
            return EMPTY
        key = Pass(split, empty_memory)
        if key not in self._scores:
            self._scores[key] = self._compute(split, empty_memory=empty_memory)
        return self._scores[key]

    def score_draws(self, split: Split, max_windows: int, draws: int) -> Tensor:
        """Loss sums and target counts of windows over `draws` draws of the objective's noise.

        The windows are a sample of at most `max_windows` of the split. [windows, 2] float64.
        """
        windows, size = self._windows[split], self.config.evaluation.batch_size
        rows = []
        for number in sample_windows(len(windows), max_windows):
            total = torch.zeros(2, dtype=torch.float64)
            for first in range(0, draws, size):
                keys = number * draws + np.arange(first, min(first + size, draws))
                batch = windows.gather(np.full(len(keys), number), keys)
                total += self._scorer.score(batch).sum(1).cpu()
            rows.append(total)
        return torch.stack(rows)

    def losses(self, batch: Batch, *, empty_memory: bool = False) -> tuple[Tensor, Tensor]:
        """As `Scorer.losses`, for sequences that a task makes itself."""
        return self._scorer.losses(batch, empty_memory=empty_memory)

    def batches(self, split: Split, max_windows: int) -> Iterator[Batch]:
        """Batches of the first windows of the sample of a split, at most `max_windows`."""
        size = self.config.evaluation.batch_size
        return validation_batches(self._windows[split], size, max_windows=max_windows)

    def losses_and_use(self, batch: Batch) -> tuple[Tensor, Tensor, MemoryUse]:
        """As `Scorer.losses_and_use`."""
        return self._scorer.losses_and_use(batch)

    def cells(self, task: str, settings: BaseModel) -> Cells:
        """Where the finished parts of a task with these settings are kept."""
        key = content_key(
            {
                "checkpoint": sha256(self.checkpoint / MANIFEST),
                "dataset": self.manifest.key,
                "packing": self.config.packing.model_dump(mode="json"),
                "settings": settings.model_dump(mode="json"),
                "seed": self.config.run.seed,
                "version": CELLS_VERSION,
            }
        )
        return Cells(self.run_dir / "evaluation" / f"{task}-{key[:16]}")

    def _compute(self, split: Split, *, empty_memory: bool) -> Score:
        settings = self.config.evaluation
        totals, windows = torch.zeros(1), 0
        for batch in validation_batches(
            self._windows[split], settings.batch_size, max_windows=settings.max_windows
        ):
            totals = totals + self._scorer.score(batch, empty_memory=empty_memory).cpu()
            windows += len(batch.tokens)
            self.on_windows(len(batch.tokens))
        score = Score.of_totals(windows, totals)
        if score.loss is not None and not math.isfinite(score.loss):
            raise CheckpointError(f"{self.checkpoint}: the {split} loss is {score.loss}")
        return score

    def _check_vocabulary(self) -> None:
        entries, needed = self.model.lm_head.out_features, self.manifest.tokenizer.vocab_size
        if entries < needed:
            raise CheckpointError(
                f"{self.checkpoint}: the model's vocabulary size is {entries}, the dataset "
                f"{self.dataset_dir} needs {needed}"
            )

    @property
    def last_step(self) -> int:
        """Total optimizer steps of the run."""
        return self.position.last_step(self.config)

    @property
    def plots_dir(self) -> Path:
        """Folder of the plots."""
        return self.run_dir / "plots"
