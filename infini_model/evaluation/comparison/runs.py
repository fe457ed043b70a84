"""What a comparison reads of a run, from the small files of its folder."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from infini_model.config import Config
from infini_model.data.manifest import read_manifest
from infini_model.runtime.errors import DataError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import (
    EVALUATION,
    VALIDATION_LOSS,
    dataset_here,
    read_run,
    read_run_config,
)
from infini_model.training.run_status import read_status

SEED = "run.seed"
# Names and places, and what is done about failures: they say nothing of how a run was made.
LEFT_OUT = (
    *("run.name", "run.preset", "run.output_dir", "run.data_dir", "run.store", "run.data_store"),
    *("run.log_level", "data.name", "data.folder", "logging.tensorboard_dir"),
    *("comparison", "tracking", "stages"),
)


class ComparedRun(BaseModel):
    """A run of a comparison.

    Attributes:
        run_dir: Its folder.
        settings: Its settings by dotted key, as text, without names and places.
        context: What decides whether its loss can be compared with that of another run, by what
            it is called, in the order in which to name a difference.
        seed: Its seed.
        progress: State and step in words; empty if the run is finished and evaluated.
        results: Metrics of the evaluation and of the training, by name.
        intervals: Intervals of 95%, (low, high), of some of them.
        lines: Its `metrics.jsonl`.
    """

    model_config = ConfigDict(frozen=True)

    run_dir: Path
    settings: dict[str, str]
    context: dict[str, str]
    seed: int
    progress: str
    results: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    lines: list[Line]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.run_dir.name

    @property
    def loss(self) -> float | None:
        """The validation loss of the evaluation, if there is one."""
        return self.results.get(VALIDATION_LOSS)

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """Read a run. Raises `DataError` or `ConfigError` if the folder is no run or is damaged."""
        config, record = read_run_config(run_dir), read_run(run_dir)
        try:
            lines = read_metrics(run_dir)
            evaluation = _evaluation(run_dir)
        except ValueError as error:
            raise DataError(f"{run_dir}: is damaged ({error})") from error
        status = read_status(run_dir)
        evaluated = evaluation.get("step")
        is_done = status.state == "finished" and VALIDATION_LOSS in evaluation.get("metrics", {})
        tokens = _tokens(lines)
        progress = f"{status.state} at step {status.step:,}"
        if status.total is not None:
            progress += f" of {status.total:,}"
        if evaluated is None:
            progress += ", not evaluated yet"
        elif status.state != "finished":
            progress += f", evaluated at step {evaluated:,}"
        elif not is_done:
            progress += ", evaluated without the task loss"
        return cls(
            run_dir=run_dir,
            settings=dict(_flat(config.model_dump(mode="json"))),
            context=_context(run_dir, config, record.dataset_key, evaluation, tokens),
            seed=config.run.seed,
            progress="" if is_done else progress,
            results={**evaluation.get("metrics", {}), **_training_results(lines, tokens)},
            intervals=evaluation.get("intervals", {}),
            lines=lines,
        )


def _evaluation(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / EVALUATION).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values, as an override would give them, without names and places."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)


def _context(
    run_dir: Path,
    config: Config,
    dataset: str,
    evaluation: Mapping[str, Any],
    tokens: int,
) -> dict[str, str]:
    context = {}
    with contextlib.suppress(DataError, OSError, ValueError):
        manifest = read_manifest(Path(dataset_here(run_dir)))
        context["tokenizer"] = manifest.tokenizer.fingerprint[:16]
    return {
        **context,
        "dataset": dataset[:16],
        "evaluated dataset": str(evaluation.get("dataset_key") or dataset)[:16],
        "objective": config.training.objective,
        "context length": f"{config.packing.context_length:,}",
        "way of packing": config.packing.mode,
        "number of scored windows": str(config.evaluation.max_windows or "all"),
        "number of training tokens": f"{tokens:,}",
    }


def _tokens(lines: list[Line]) -> int:
    """Tokens read in training, padding included."""
    read = (
        line["train/tokens_per_second"] * line["train/step_seconds"]
        for line in lines
        if "train/step_seconds" in line and "train/tokens_per_second" in line
    )
    return sum(map(round, read))


def _training_results(lines: list[Line], tokens: int) -> dict[str, float]:
    """What `metrics.jsonl` says of the whole training."""
    results: dict[str, float] = {}
    for line in lines:
        results["steps"] = line["step"]
        if "validation/loss" in line:
            results["validation/loss"] = line["validation/loss"]
    rates = [line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line]
    if rates:
        results |= {"tokens": tokens, "tokens per second": statistics.median(rates)}
    return results
