"""The subject of evaluation tasks: a trained model and a dataset's held-out splits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from infini_model.config import Config
from infini_model.data.loading.validation import sample_windows, validation_batches
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.manifest import Manifest, Split, read_manifest
from infini_model.evaluation.score import EMPTY, Score
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer
from infini_model.runtime.errors import CheckpointError
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.launch.devices import first_device

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
        on_windows: Called after each scored batch with its number of windows.
    """

    def __init__(self, run_dir: Path, dataset_dir: Path, config: Config) -> None:
        """Load the model.

        Raises:
            CheckpointError: There is no checkpoint, or its vocabulary is too small.
            DataError: The folder is not a dataset, or is damaged.
        """
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None:
            raise CheckpointError(f"{run_dir / 'checkpoints'}: no checkpoint found; train first")
        self.run_dir, self.dataset_dir, self.config = run_dir, dataset_dir, config
        self.checkpoint, self.position = checkpoint, read_position(checkpoint)
        self.manifest: Manifest = read_manifest(dataset_dir)
        device = first_device(config.launch.gpus)
        self.model = InfiniLlama.from_pretrained(
            checkpoint / "model",
            device=device,
            attention_backend=config.launch.attention_backend,
        ).eval()
        self._check_vocabulary()
        precision = resolve_precision(config.training.precision, torch.device(device))
        module = LossModule(self.model, make_objective(config))
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
