"""Runs side by side: where they differ, and which losses can be compared.

All is read from the small files of the run folders.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from infini_model.config import leaves
from infini_model.data.manifest import read_manifest
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import (
    EVALUATION,
    VALIDATION_BITS,
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
    *("comparison.", "tracking.", "stages."),
)
# Up to this many differing settings name a group of runs; beyond, its first run does.
FEW_SETTINGS = 4
# What is not the same for runs whose tokenizers differ, and so are compared in bits per byte.
OF_TOKENIZER = ("tokenizer", "dataset", "evaluated dataset")
# Seeds draw other windows, which are not padded alike.
SAME_TOKENS = 0.02


class ComparedRun(NamedTuple):
    """A run of a comparison.

    Attributes:
        settings: Its settings by dotted key, as text, without names and places.
        context: What decides whether its loss can be compared with that of another run, by what
            it is called, in the order in which to name a difference.
        progress: State and step in words; empty if the run is finished and evaluated.
        results: Metrics of the evaluation and of the training, by name.
        intervals: Intervals of 95%, (low, high), of some of them.
    """

    run_dir: Path
    settings: dict[str, str]
    context: dict[str, str]
    seed: int
    progress: str
    results: dict[str, float]
    intervals: dict[str, tuple[float, float]]

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
        config, dataset = read_run_config(run_dir), read_run(run_dir).dataset_key
        evaluation: dict[str, Any] = {}
        try:
            lines = read_metrics(run_dir)
            with contextlib.suppress(FileNotFoundError):
                evaluation = dict(json.loads((run_dir / EVALUATION).read_text(encoding="utf-8")))
        except ValueError as error:
            raise DataError(f"{run_dir}: is damaged ({error})") from error
        status = read_status(run_dir)
        settings = evaluation.get("settings") or config.evaluation.model_dump()
        is_scored = VALIDATION_LOSS in evaluation.get("metrics", {})
        progress = f"{status.state} at step {status.step:,}"
        if not is_scored:
            progress += ", without a validation loss"
        results = _training_results(lines)
        context, text = {}, ""
        with contextlib.suppress(DataError, OSError, ValueError):
            manifest = read_manifest(Path(dataset_here(run_dir)))
            context["tokenizer"] = manifest.tokenizer.fingerprint[:16]
            validated = manifest.splits["validation"].documents
            text = f"{manifest.corpus.bytes:,} bytes, {validated:,} documents validated"
        context |= {
            "dataset": dataset[:16],
            "evaluated dataset": str(evaluation.get("dataset_key") or dataset)[:16],
            "objective": config.training.objective,
            "context length": f"{config.packing.context_length:,}",
            "way of packing": config.packing.mode,
            "number of scored windows": str(settings["max_windows"] or "all"),
            **({"text": text} if text else {}),
        }
        return cls(
            run_dir=run_dir,
            settings={
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in leaves(config.model_dump(mode="json"))
                if not key.startswith(LEFT_OUT)
            },
            context=context,
            seed=config.run.seed,
            progress="" if status.state == "finished" and is_scored else progress,
            results={**evaluation.get("metrics", {}), **results},
            intervals=evaluation.get("intervals", {}),
        )


def _training_results(lines: Sequence[Line]) -> dict[str, float]:
    """Sum up the whole training from `metrics.jsonl`; tokens are targets, without padding."""
    results = {"steps": lines[-1]["step"]} if lines else {}
    timed = [
        (line["train/tokens_per_second"], line.get("train/step_seconds", 0.0))
        for line in lines
        if "train/tokens_per_second" in line
    ]
    if timed:
        results["tokens"] = sum(round(rate * seconds) for rate, seconds in timed)
        results["tokens per second"] = statistics.median(rate for rate, _ in timed)
    return results


class Group(NamedTuple):
    """Runs of the same settings and data that differ in their seed at most, and what to call it."""

    label: str
    runs: list[ComparedRun]

    @property
    def samples(self) -> dict[int, ComparedRun]:
        """The first evaluated run of each seed, as two of the same seed are not two samples."""
        return {run.seed: run for run in reversed(self.runs) if run.loss is not None}


class Difference(NamedTuple):
    """Validation losses of a group minus those of the control, by their common seeds.

    `metric` is the loss that is compared, in nats per token or in bits per byte.
    """

    group: Group
    control: Group
    by_seed: dict[int, float]
    metric: str


class Comparison(NamedTuple):
    """Runs side by side.

    Attributes:
        runs: The runs that could be read, in the order in which they were given.
        differing: The settings that are not the same in all runs: value by run, None if it has no
            such setting.
        differences: Of all groups that can be compared with that of the first evaluated run.
        notes: One line for each run that could not be read or is not finished, or whose loss is not
            compared, with the reason.
    """

    runs: list[ComparedRun]
    differing: dict[str, list[str | None]]
    differences: list[Difference]
    notes: list[str]

    @property
    def names(self) -> list[str]:
        """The runs by name, or by folder where names are not unique."""
        names = [run.name for run in self.runs]
        return names if len(set(names)) == len(names) else [str(run.run_dir) for run in self.runs]


def compare(run_dirs: Iterable[Path], failures: Iterable[str] = ()) -> Comparison:
    """Compare runs. Their losses are compared with those of the first run that is evaluated.

    With several seeds of the same settings it is seed by seed. `failures` are further notes, on
    runs that are left out.

    Raises `UserError` if none of the folders can be read.
    """
    runs, notes = [], list(failures)
    for run_dir in run_dirs:
        try:
            runs.append(ComparedRun.read(run_dir))
        except UserError as error:
            notes.append(f"{run_dir.name}: cannot be read ({error})")
    if not runs:
        raise UserError("; ".join(notes) or "there are no runs to compare")
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: [run.settings.get(key) for run in runs] for key in keys}
    differing = {key: values for key, values in columns.items() if len(set(values)) > 1}
    groups = _groups(runs, differing)
    first = next((run for run in runs if run.loss is not None), None)
    control = next((group for group in groups if first in group.runs), Group("", []))
    notes += [f"{run.name}: {run.progress}" for run in runs if run.progress]
    base, differences = control.samples, list[Difference]()
    for group in groups:
        by_seed = dict[int, float]()
        metric = VALIDATION_LOSS if _cut_alike(group.runs[0], first) else VALIDATION_BITS
        for run in group.runs:
            if run.loss is None or first is None:
                continue
            if obstacle := _obstacle(run, group, control, first):
                notes.append(f"{run.name}: {obstacle}: not compared")
            elif group is not control:
                by_seed[run.seed] = run.results[metric] - base[run.seed].results[metric]
        if by_seed:
            differences.append(Difference(group, control, by_seed, metric))
    return Comparison(runs, differing, differences, notes)


def _groups(runs: Sequence[ComparedRun], differing: Mapping[str, list[str | None]]) -> list[Group]:
    keys = [key for key in differing if key != SEED]
    found: dict[tuple[str | None, ...], list[ComparedRun]] = {}
    for run in runs:
        values = [run.settings.get(key) for key in keys]
        found.setdefault((run.context["dataset"], *values), []).append(run)
    labels = [
        ", ".join(f"{key}={x}" for key, x in zip(keys, values, strict=True) if x is not None)
        for _, *values in found
    ]
    if not 0 < len(keys) <= FEW_SETTINGS or len(found) == 1 or len(set(labels)) < len(labels):
        labels = [members[0].name for members in found.values()]
    return [Group(*each) for each in zip(labels, found.values(), strict=True)]


def _cut_alike(run: ComparedRun, other: ComparedRun | None) -> bool:
    """Return True unless the tokenizers of two runs are known to differ."""
    known = {each.context.get("tokenizer") for each in (run, other) if each is not None}
    return len(known - {None}) < 2


def _obstacle(run: ComparedRun, group: Group, control: Group, first: ComparedRun) -> str:
    """Why the loss of a run of `group` is not compared; empty if it is.

    `first` is the first run of the control's group that is evaluated.
    """
    base = control.samples
    other = base.get(run.seed, first)
    alike = _cut_alike(run, other)
    for what, value in run.context.items():
        theirs = other.context.get(what, value)
        if value != theirs and (alike or what not in OF_TOKENIZER):
            return f"its {what} is {value}, that of {other.name} {theirs}"
    if not alike:
        for each in (run, other):
            is_whole = each.context["number of scored windows"] == "all"
            is_own = each.context["dataset"] == each.context["evaluated dataset"]
            if not (is_whole and is_own and VALIDATION_BITS in each.results):
                need = "other tokens need bits per byte of all text (evaluation.max_windows=null)"
                return f"{need}, which {each.name} lacks"
    tokens, those = (int(each.results.get("tokens", 0)) for each in (run, other))
    if alike and abs(tokens - those) > SAME_TOKENS * those:
        return f"its number of training tokens is {tokens:,}, that of {other.name} {those:,}"
    if run.seed not in base:
        return f"no evaluated run with the settings of {first.name} has its seed, {run.seed}"
    sample = group.samples[run.seed]
    if sample.run_dir != run.run_dir:
        return f"{sample.name} has its settings and its seed, {run.seed}"
    return ""
