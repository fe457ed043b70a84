"""What evaluation tasks measure: a trained model, and the held-out data of a dataset."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch

from infini_model.config import Config
from infini_model.data.loading.validation import sample_windows, validation_batches
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.manifest import Manifest, Split, read_manifest
from infini_model.evaluation.score import NOTHING, Score
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


class Subject:
    """The newest checkpoint of a run and the held-out splits, scored as in training.

    Attributes:
        checkpoint: Its folder.
        position: Where the training stood.
        model: In eval mode, on the device of `launch.gpus`.
        manifest: Of the dataset.
        on_windows: Called with the number of windows after each batch that was scored.
    """

    def __init__(self, run_dir: Path, dataset_dir: Path, config: Config) -> None:
        """Load the model.

        Raises:
            CheckpointError: There is no checkpoint, or its vocabulary is not the dataset's.
            DataError: The folder is not a dataset, or it is damaged.
        """
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None:
            raise CheckpointError(f"{run_dir / 'checkpoints'}: there is no checkpoint; train first")
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
        self._scores: dict[tuple[Split, bool], Score] = {}
        self.on_windows: Callable[[int], None] = lambda windows: None  # noqa: ARG005

    def sample_size(self, split: Split) -> int:
        """Windows of a split that are scored."""
        if split not in self._windows:
            return 0
        return len(sample_windows(len(self._windows[split]), self.config.evaluation.max_windows))

    def score(self, split: Split, *, empty_memory: bool = False) -> Score:
        """The score of a split, computed once.

        `empty_memory` empties the memory at every segment border. Raises `CheckpointError` if the
        loss is not finite.
        """
        if not self.sample_size(split):
            log.warning(
                "%s: split %s has no whole window; it is not scored", self.dataset_dir, split
            )
            return NOTHING
        key = split, empty_memory
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
            raise CheckpointError(f"{self.checkpoint}: its loss on {split} is {score.loss}")
        return score

    def _check_vocabulary(self) -> None:
        entries, needed = self.model.lm_head.out_features, self.manifest.tokenizer.vocab_size
        if entries < needed:
            raise CheckpointError(
                f"{self.checkpoint}: the model has {entries} entries in its vocabulary, the "
                f"dataset {self.dataset_dir} needs {needed}"
            )

    @property
    def last_step(self) -> int:
        """Optimizer steps of the run in all."""
        return self.position.last_step(self.config)

    @property
    def plots_dir(self) -> Path:
        """Where pictures go."""
        return self.run_dir / "plots"
