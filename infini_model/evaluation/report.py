"""Score a trained run and tell of it: `report.md`, `plots/*.png` and a result for the caller."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infini_model.config import Config
from infini_model.data.loading.loader import open_windows, validation_batches
from infini_model.data.manifest import Manifest, Split, read_manifest
from infini_model.evaluation import markdown, plots
from infini_model.evaluation.sample import Sample, draw_sample
from infini_model.evaluation.score import NOTHING, Score, score
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import record_evaluation
from infini_model.runtime.storage import atomic_file
from infini_model.training.checkpoints.checkpoint import Position, newest_checkpoint, read_position
from infini_model.training.launch.devices import first_device

log = logging.getLogger(__name__)

HELD_OUT: tuple[Split, ...] = ("validation", "test")
ALL_WINDOWS = 1 << 62


class EvaluationResult(BaseModel):
    """What an evaluation found, and where it is written.

    Attributes:
        step: Optimizer steps of the checkpoint that was evaluated.
        last_step: Optimizer steps of the run in all.
        checkpoint: Its folder.
        dataset_key: Key of the dataset that the scores are of.
        scores: `validation` and `test`; of an empty split the loss is None.
        without_memory: The score of the split of `loss_by_segment`'s picture with the memory
            emptied at every segment border; None for a model without memory, or without data.
        sample: A continuation of a held-out document; None where there is no document.
        report: Path of report.md.
        plots: Paths of the pictures.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    last_step: int
    checkpoint: Path
    dataset_key: str
    scores: dict[Split, Score]
    without_memory: Score | None
    sample: Sample | None
    report: Path
    plots: list[Path]

    @property
    def metrics(self) -> dict[str, float]:
        """The scores as flat metrics, `evaluation/test_loss` and so on."""
        found = {}
        for split, scored in self.scores.items():
            if scored.loss is not None and scored.perplexity is not None:
                found[f"evaluation/{split}_loss"] = scored.loss
                found[f"evaluation/{split}_perplexity"] = scored.perplexity
        return found


def evaluate_run(
    run_dir: Path,
    dataset_dir: Path,
    config: Config,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate the newest checkpoint of a run: `report.md`, then the record `evaluation.json`.

    The same checkpoint, dataset and settings give the same numbers and the same sample.

    Args:
        run_dir: The run folder.
        dataset_dir: A dataset folder of the run's tokenizer.
        config: The run's configuration; `evaluation` says how much is scored.
        progress: Called with windows scored and windows in all.

    Raises:
        CheckpointError: No checkpoint, no metrics, a model of another vocabulary than the dataset,
            or one whose loss is not finite.
        DataError: The dataset folder is none, or damaged.
    """
    lines = read_metrics(run_dir)
    if not lines:
        raise CheckpointError(f"{run_dir / 'metrics.jsonl'}: there are no metrics; train first")
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir / 'checkpoints'}: there is no checkpoint; train first")
    manifest = read_manifest(dataset_dir)
    model = InfiniLlama.from_pretrained(
        checkpoint / "model",
        device=first_device(config.launch.gpus),
        attention_backend=config.launch.attention_backend,
    ).eval()
    _check_vocabulary(model, checkpoint, dataset_dir, manifest)
    position = read_position(checkpoint)
    scores, without_memory = _score_all(model, dataset_dir, manifest, config, progress)
    for split, scored in scores.items():
        if scored.loss is not None and not math.isfinite(scored.loss):
            raise CheckpointError(f"{checkpoint}: its loss on {split} is {scored.loss}")
    sample = draw_sample(model, dataset_dir, manifest, config.evaluation, config.run.seed)
    pictures = _draw(run_dir, config, model, lines, scores, without_memory)
    result = EvaluationResult(
        step=position.step,
        last_step=position.last_step(config),
        checkpoint=checkpoint,
        dataset_key=manifest.key,
        scores=scores,
        without_memory=without_memory,
        sample=sample,
        report=run_dir / "report.md",
        plots=pictures,
    )
    text = _text(result, run_dir, config, model, manifest, position, lines)
    with atomic_file(result.report) as temporary:
        temporary.write_text(text, encoding="utf-8")
    record_evaluation(run_dir, result.step, manifest.key, result.metrics)
    return result


def _text(
    result: EvaluationResult,
    run_dir: Path,
    config: Config,
    model: InfiniLlama,
    manifest: Manifest,
    position: Position,
    lines: list[Line],
) -> str:
    """The whole report."""
    scores = {str(split): scored for split, scored in result.scores.items()}
    whole = config.evaluation.max_batches is None
    sections = [
        f"# {run_dir.name}",
        f"An Infini-Llama after {result.step:,} steps.",
        markdown.model_section(model, config, manifest, position),
        "## Scores",
        markdown.scores_section(scores, result.without_memory, whole=whole),
        "## Speed",
        markdown.speed_section(lines),
        "## Curves",
        markdown.pictures_section(result.plots, run_dir),
        "## A sample",
        markdown.sample_section(result.sample),
        "## Again",
        markdown.reproduce_section(run_dir),
    ]
    return "\n\n".join(sections) + "\n"


def _check_vocabulary(
    model: InfiniLlama, checkpoint: Path, dataset_dir: Path, manifest: Manifest
) -> None:
    entries = model.lm_head.out_features
    if entries < manifest.tokenizer.vocab_size:
        raise CheckpointError(
            f"{checkpoint}: the model has {entries} entries in its vocabulary, the dataset "
            f"{dataset_dir} needs {manifest.tokenizer.vocab_size}"
        )


def _score_all(
    model: InfiniLlama,
    dataset_dir: Path,
    manifest: Manifest,
    config: Config,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[Split, Score], Score | None]:
    """Score the held-out splits, and one of them once more without what the memory holds."""
    settings, length = config.evaluation, model.config.segment_length
    bf16 = model.lm_head.weight.is_cuda and config.training.precision != "fp32"
    opened = {
        split: open_windows(dataset_dir, split, config.packing, length)
        for split in HELD_OUT
        if manifest.splits[split].tokens
    }
    limit = ALL_WINDOWS if settings.max_batches is None else settings.max_batches
    sizes = {s: min(len(w), limit * settings.batch_size) for s, w in opened.items()}
    compared = next((split for split in HELD_OUT if sizes.get(split)), None)
    if model.config.memory == "none" or config.packing.context_length == length:
        compared = None
    total, done = sum(sizes.values()) + (sizes[compared] if compared else 0), 0

    def advance(windows: int) -> None:
        nonlocal done
        done += windows
        if progress is not None:
            progress(done, total)

    def run(split: Split, *, forget: bool = False) -> Score:
        if not sizes.get(split):
            log.warning("%s: split %s has no whole window; it is not scored", dataset_dir, split)
            return NOTHING
        batches = validation_batches(opened[split], settings.batch_size, max_windows=sizes[split])
        return score(model, batches, bf16=bf16, forget=forget, advance=advance)

    scores = {split: run(split) for split in HELD_OUT}
    return scores, run(compared, forget=True) if compared else None


def _draw(
    run_dir: Path,
    config: Config,
    model: InfiniLlama,
    lines: list[Line],
    scores: dict[Split, Score],
    without_memory: Score | None,
) -> list[Path]:
    """Draw every picture that there is something to show in."""
    folder = run_dir / "plots"
    pictures = []
    if plots.series(lines, "train/loss")[0]:
        pictures = [
            plots.plot_loss(lines, folder / "loss.png"),
            plots.plot_learning_rate(lines, folder / "learning_rate.png"),
            plots.plot_gradient_norm(
                lines, config.training.max_grad_norm, folder / "gradient_norm.png"
            ),
            plots.plot_throughput(lines, folder / "throughput.png"),
        ]
    curves = {str(split): scored for split, scored in scores.items() if scored.tokens}
    emptied = {} if without_memory is None else {next(iter(curves)): without_memory}
    if curves:
        path = folder / "loss_by_segment.png"
        pictures.append(plots.plot_segments(curves, emptied, model.config.segment_length, path))
    return pictures
