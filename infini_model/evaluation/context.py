"""What evaluation tasks work with: a model, held-out splits, and the kept results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infini_model.config import Config
from infini_model.data.loading.windows import Windows, open_windows, validation_batches
from infini_model.data.manifest import Manifest, Split, read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.model.layers import Part
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer, bits_per_byte
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import MODEL, is_started, newest_checkpoint, read_run
from infini_model.runtime.storage import MANIFEST, content_key, sha256, write_json
from infini_model.training.checkpoint import read_state
from infini_model.training.export import load_model

# To be raised when a task measures differently, so that no older result is taken for a new one.
RESULTS_VERSION = 2
HELD_OUT: tuple[Split, ...] = ("validation", "test")


class Score(NamedTuple):
    """The losses of the windows of a split.

    Attributes:
        tokens: Tokens predicted, without masked ones; of conversations, those that are learned.
        loss: Mean loss in nats per token, for each of these; None without any.
        bits_per_byte: The same in bits for each byte of text; None without any.
        by_source: The scores of the named sources.
    """

    windows: int = 0
    tokens: int = 0
    loss: float | None = None
    bits_per_byte: float | None = None
    by_source: Mapping[str, Score] = {}

    @property
    def perplexity(self) -> float | None:
        """exp(loss), capped at e^700 to avoid overflow."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


def _score(windows: int, totals: Tensor) -> Score:
    """The score of windows with these loss sums, targets and their bytes by segment, [3, S]."""
    loss, count, size = totals.sum(1).tolist()
    # Shares of an answer add up to almost 1.
    tokens = round(count)
    mean = loss / count if tokens else None
    return Score(windows, tokens, mean, bits_per_byte(loss, size))


class Pass(NamedTuple):
    """A pass over the sample of a split; `without` is a part of the attention knocked out."""

    split: Split
    without: Part | None = None


def kept_or_computed(folder: Path, part: str, compute: Callable[[], Any]) -> Any:
    """The result of `part` that is kept in `folder`, or that of `compute`, which is kept there.

    It is a tree of JSON values. A part is a measurement of its own, such as the answers at one
    length, so that an interrupted evaluation resumes. Raises `UserError` if the disk is full.
    """
    path = folder / f"{part}.json"
    if not path.exists():
        result = compute()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
    # What is read is the same at the first evaluation and at later ones: tuples are lists.
    return json.loads(path.read_text(encoding="utf-8"))


class EvalContext:
    """A model and the held-out splits of a dataset, scored as in training.

    Attributes:
        name: What is evaluated, for messages.
        model: The model in eval mode.
        weights_key: Key of its weights, for results that are kept.
        folder: Where results are kept, and plots written.
        scorer: Scores batches, also those that a task makes itself.
        on_windows: Called after each scored batch with its number of windows, which is 0 for parts
            of what is counted later.
    """

    def __init__(
        self,
        run_dir: Path,
        dataset_dir: Path,
        config: Config,
        model: InfiniLlama,
        windows: Callable[[Split], Windows],
        *,
        name: str,
        weights_key: str,
        folder: Path,
    ) -> None:
        """`windows` opens those of a split. Raises `DataError` if it is not a dataset."""
        self.run_dir, self.dataset_dir, self.config = run_dir, dataset_dir, config
        self.model, self.name, self.weights_key = model, name, weights_key
        self.folder, self.plots_dir = folder, folder / "plots"
        self.manifest: Manifest = read_manifest(dataset_dir)
        module = LossModule(model, make_objective(config.updated(model=model.config)))
        device, tokenizer = model.lm_head.weight.device, load_dataset_tokenizer(dataset_dir)
        self.scorer = Scorer(module, model.precision, device, tokenizer.byte_lengths())
        held_out = [split for split in HELD_OUT if self.manifest.splits[split].tokens]
        self._windows = {split: windows(split) for split in held_out}
        self._scores: dict[Pass, Score] = {}
        self.on_windows: Callable[[int], None] = lambda windows: None  # noqa: ARG005

    def sample_size(self, split: Split) -> int:
        """Number of windows of a split that are scored."""
        if split not in self._windows:
            return 0
        return len(self._windows[split].sample(self.config.evaluation.max_windows))

    def score(self, split: Split, without: Part | None = None) -> Score:
        """The score of a split, computed once.

        `without` is as in `Pass`. Raises `CheckpointError` if the loss is not finite.
        """
        if not self.sample_size(split):
            return Score()
        key, settings = Pass(split, without), self.config.evaluation
        if key in self._scores:
            return self._scores[key]
        windows, totals = self._windows[split], torch.zeros(1, 3, 1)
        for batch in validation_batches(
            windows, settings.batch_size, max_windows=settings.max_windows
        ):
            losses = self.scorer.score(batch, without).cpu()
            totals = totals + windows.sum_by_source(losses, batch)
            self.on_windows(len(losses))
        sizes = windows.sample_sizes(settings.max_windows)
        parts = dict(zip(windows.sources, map(_score, sizes, totals), strict=True))
        score = _score(sum(sizes), windows.add_sources(totals, settings.max_windows))
        if score.loss is not None and not math.isfinite(score.loss):
            raise CheckpointError(f"{self.name}: the {split} loss is {score.loss}")
        tokens = sum(part.tokens for part in parts.values())
        by_source = {} if "" in parts else parts
        self._scores[key] = score._replace(tokens=tokens, by_source=by_source)
        return self._scores[key]

    def kept_folder(self, task: str, settings: Mapping[str, object]) -> Path:
        """The folder of the finished parts of a task, named by all that decides the results.

        `settings` are JSON values.
        """
        key = content_key(
            {
                "checkpoint": self.weights_key,
                "dataset": self.manifest.key,
                "packing": self.config.packing.model_dump(mode="json"),
                "settings": settings,
                "seed": self.config.run.seed,
                "version": RESULTS_VERSION,
            }
        )
        return self.folder / "evaluation" / f"{task}-{key[:16]}"


class CheckpointContext(EvalContext):
    """The newest checkpoint of a run, its model on the device of `launch.gpus`.

    Attributes:
        checkpoint: Its folder.
        position: The training state of the checkpoint.
        planned_steps: Optimizer steps for which the run was planned.
        record: What the run belongs to; None in a folder that no command has claimed.
        last_step: The step with which it ends, an earlier one after early stopping.
    """

    def __init__(self, run_dir: Path, dataset_dir: Path, config: Config) -> None:
        """Load the model.

        Raises `CheckpointError` if there is no checkpoint, or its vocabulary is too small;
        `DataError` if the folder is not a dataset, or is damaged; `ConfigError` if the weights of a
        LoRA run are gone; `DeviceError` as `load_model`.
        """
        checkpoint = newest_checkpoint(run_dir)
        if checkpoint is None:
            raise CheckpointError(f"{run_dir / 'checkpoints'}: no checkpoint found; train first")
        self.checkpoint, self.position = checkpoint, read_state(checkpoint)
        self.planned_steps = int(self.position.config["training"]["max_steps"])
        self.record = read_run(run_dir) if is_started(run_dir) else None
        self.last_step = (self.record and self.record.max_steps) or self.planned_steps
        needed = read_manifest(dataset_dir).tokenizer.vocab_size
        model = load_model(checkpoint / MODEL, config)
        if (entries := model.lm_head.out_features) < needed:
            raise CheckpointError(
                f"{checkpoint}: the model's vocabulary size is {entries}, the dataset "
                f"{dataset_dir} needs {needed}"
            )
        length = model.config.segment_length
        super().__init__(
            *(run_dir, dataset_dir, config, model),
            partial(open_windows, dataset_dir, config=config.packing, segment_length=length),
            name=str(checkpoint),
            weights_key=sha256(checkpoint / MANIFEST),
            folder=run_dir,
        )
