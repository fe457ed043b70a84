"""Runs side by side: where they differ, which losses can be compared, and the page that says so.

All is read from the small files of the run folders.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from infini_model.data.manifest import read_manifest
from infini_model.evaluation.plots import plot_runs
from infini_model.evaluation.report import bullets, picture, write_pages
from infini_model.evaluation.task import table
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import (
    EVALUATION,
    VALIDATION_LOSS,
    dataset_here,
    read_run,
    read_run_config,
)
from infini_model.runtime.storage import content_key
from infini_model.training.run_status import read_status

SEED = "run.seed"
# Names and places, and what is done about failures: they say nothing of how a run was made.
LEFT_OUT = (
    *("run.name", "run.preset", "run.output_dir", "run.data_dir", "run.store", "run.data_store"),
    *("run.log_level", "data.name", "data.folder", "logging.tensorboard_dir"),
    *("comparison", "tracking", "stages"),
)
# Up to this many differing settings name a group of runs; beyond, its first run does.
FEW_SETTINGS = 4
# Longest name of a folder that is made of the names of all runs.
NAME_LENGTH = 80
# Of a run without a value.
MISSING = "–"
WHOLE_NUMBERS = ("steps", "tokens", "tokens per second")


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
        config, dataset = read_run_config(run_dir), read_run(run_dir).dataset_key
        evaluation: dict[str, Any] = {}
        try:
            lines = read_metrics(run_dir)
            with contextlib.suppress(FileNotFoundError):
                evaluation = dict(json.loads((run_dir / EVALUATION).read_text(encoding="utf-8")))
        except ValueError as error:
            raise DataError(f"{run_dir}: is damaged ({error})") from error
        status = read_status(run_dir)
        evaluated = evaluation.get("step")
        is_done = status.state == "finished" and VALIDATION_LOSS in evaluation.get("metrics", {})
        progress = f"{status.state} at step {status.step:,}"
        if status.total is not None:
            progress += f" of {status.total:,}"
        if evaluated is None:
            progress += ", not evaluated yet"
        elif status.state != "finished":
            progress += f", evaluated at step {evaluated:,}"
        elif not is_done:
            progress += ", evaluated without the task loss"
        results = _training_results(lines)
        context = {}
        with contextlib.suppress(DataError, OSError, ValueError):
            manifest = read_manifest(Path(dataset_here(run_dir)))
            context["tokenizer"] = manifest.tokenizer.fingerprint[:16]
        context |= {
            "dataset": dataset[:16],
            "evaluated dataset": str(evaluation.get("dataset_key") or dataset)[:16],
            "objective": config.training.objective,
            "context length": f"{config.packing.context_length:,}",
            "way of packing": config.packing.mode,
            "number of scored windows": str(config.evaluation.max_windows or "all"),
            "number of training tokens": f"{results.get('tokens', 0):,}",
        }
        return cls(
            run_dir=run_dir,
            settings=dict(_flat(config.model_dump(mode="json"))),
            context=context,
            seed=config.run.seed,
            progress="" if is_done else progress,
            results={**evaluation.get("metrics", {}), **results},
            intervals=evaluation.get("intervals", {}),
            lines=lines,
        )


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


def _training_results(lines: Sequence[Line]) -> dict[str, float]:
    """What `metrics.jsonl` says of the whole training; tokens include padding."""
    results: dict[str, float] = {}
    for line in lines:
        results["steps"] = line["step"]
        if "validation/loss" in line:
            results["validation/loss"] = line["validation/loss"]
    timed = [line for line in lines if "train/tokens_per_second" in line]
    if timed:
        rates = [line["train/tokens_per_second"] for line in timed]
        read = [
            rate * line.get("train/step_seconds", 0.0)
            for rate, line in zip(rates, timed, strict=True)
        ]
        results["tokens"] = sum(map(round, read))
        results["tokens per second"] = statistics.median(rates)
    return results


class Spread(NamedTuple):
    """The mean of values, the lowest and the highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.fmean(values), min(values), max(values))


class Group(NamedTuple):
    """Runs of the same settings and data that differ in their seed at most, and what to call it."""

    label: str
    runs: list[ComparedRun]

    @property
    def samples(self) -> dict[int, ComparedRun]:
        """One run of each seed, as two of the same seed are not two samples.

        It is the first that is finished, or else the first that is evaluated.
        """
        best_last = sorted(self.runs, key=lambda run: (run.loss is None, run.progress != ""))[::-1]
        return {run.seed: run for run in best_last}

    def spread(self, metric: str) -> Spread | None:
        """The spread of a metric over the seeds; None if no run has it."""
        runs = self.samples.values()
        values = [run.results[metric] for run in runs if metric in run.results]
        return Spread.of(values) if values else None


class Difference(NamedTuple):
    """Validation losses of a group minus those of the control, by their common seeds."""

    group: Group
    control: Group
    by_seed: dict[int, float]


class Comparison(NamedTuple):
    """Runs side by side.

    Attributes:
        runs: The runs that are compared, in the order in which they were given; all of them if none
            can be.
        differing: The settings that are not the same in all runs: value by run, None if it has no
            such setting.
        groups: The runs by their settings.
        differences: Of all groups that can be compared with that of the control.
        notes: One line for each run that could not be read, is not finished or is not compared,
            with the reason.
    """

    runs: list[ComparedRun]
    differing: dict[str, list[str | None]]
    groups: list[Group]
    differences: list[Difference]
    notes: list[str]

    @property
    def names(self) -> list[str]:
        """The runs by name, or by folder where names are not unique."""
        names = [run.name for run in self.runs]
        return names if len(set(names)) == len(names) else [str(run.run_dir) for run in self.runs]

    @property
    def has_seeds(self) -> bool:
        """Whether there are several seeds of the same settings."""
        return any(len(group.samples) > 1 for group in self.groups)


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
    differing = _differing(runs)
    groups = _groups(runs, differing)
    first = next((run for run in runs if run.loss is not None), None)
    control = next((group for group in groups if first in group.runs), Group("", []))
    compared = list[ComparedRun]()
    for run in runs:
        obstacle = ""
        if first is not None and run.loss is not None:
            own = next(group for group in groups if run in group.runs)
            if not (obstacle := _obstacle(run, own, control, first)):
                compared.append(run)
        reasons = [run.progress, obstacle and f"{obstacle}: not compared"]
        if any(reasons):
            notes.append(f"{run.name}: {'; '.join(filter(None, reasons))}")
    base, differences = control.samples, list[Difference]()
    for group in groups:
        by_seed = {
            seed: run.results[VALIDATION_LOSS] - base[seed].results[VALIDATION_LOSS]
            for seed, run in group.samples.items()
            if group is not control and run in compared
        }
        if by_seed:
            differences.append(Difference(group, control, by_seed))
    if differences:
        seeds = {seed for each in differences for seed in each.by_seed}
        alone = [run for run in compared if run.seed not in seeds]
        notes += [f"{r.name}: no other run has its seed, {r.seed}: not compared" for r in alone]
        runs = [run for run in compared if run.seed in seeds]
        differing = _differing(runs)
        kept = [Group(each.label, [r for r in each.runs if r in runs]) for each in groups]
        groups = [group for group in kept if group.runs]
    return Comparison(runs, differing, groups, differences, notes)


def _differing(runs: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    columns = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def _groups(runs: Sequence[ComparedRun], differing: Mapping[str, list[str | None]]) -> list[Group]:
    keys = [key for key in differing if key != SEED]
    found: dict[tuple[str | None, ...], list[ComparedRun]] = {}
    for run in runs:
        values = [run.settings.get(key) for key in keys]
        found.setdefault((run.context["dataset"], *values), []).append(run)
    short = {key: key.rpartition(".")[2] for key in keys}
    unique = len(set(short.values())) == len(short)

    def label(values: Sequence[str | None], members: Sequence[ComparedRun]) -> str:
        if not 0 < len(keys) <= FEW_SETTINGS or len(found) == 1:
            return members[0].name
        named = zip((short[key] if unique else key for key in keys), values, strict=True)
        return ", ".join(f"{key}={value}" for key, value in named if value is not None)

    labels = [label(values, members) for (_, *values), members in found.items()]
    if len(set(labels)) < len(labels):
        labels = [members[0].name for members in found.values()]
    return [Group(*each) for each in zip(labels, found.values(), strict=True)]


def _obstacle(run: ComparedRun, group: Group, control: Group, first: ComparedRun) -> str:
    """Why the loss of a run of `group` is not compared; empty if it is.

    `first` is the first run of the control's group that is evaluated.
    """
    base = {seed: each for seed, each in control.samples.items() if each.loss is not None}
    other = base.get(run.seed, first)
    for what, value in run.context.items():
        theirs = other.context.get(what, value)
        if value != theirs:
            return f"its {what} is {value}, that of {other.name} {theirs}"
    if run.seed not in base:
        return f"no evaluated run with the settings of {first.name} has its seed, {run.seed}"
    sample = group.samples[run.seed]
    if sample.run_dir != run.run_dir:
        return f"{sample.name} has its settings and its seed, {run.seed}"
    return ""


class Files(NamedTuple):
    """What was written: Markdown, HTML, and the picture of the losses if there are any."""

    markdown: Path
    html: Path
    curves: Path | None


def write_comparison(comparison: Comparison, comparisons_dir: Path) -> Files:
    """Write `comparison.md`, a self-contained `comparison.html` and `loss.png`.

    Their folder in `comparisons_dir` is named after the runs. Raises `UserError` if it cannot be
    written.
    """
    folder = comparisons_dir / comparison_name([run.name for run in comparison.runs])
    labels = {
        str(run.run_dir): group.label if comparison.has_seeds else name
        for group in comparison.groups
        for run, name in zip(comparison.runs, comparison.names, strict=True)
        if run in group.runs
    }
    drawn = [(labels[str(run.run_dir)], run.lines) for run in comparison.runs]
    curves = plot_runs(drawn, folder / "loss.png")
    files = Files(folder / "comparison.md", folder / "comparison.html", curves)
    text = _text(comparison, curves, folder)
    title = text.partition("\n")[0].removeprefix("# ")
    write_pages(text, title, folder, files.markdown, files.html, [curves] if curves else [])
    return files


def comparison_name(names: Sequence[str]) -> str:
    """A name for the comparison of these runs, which another set of runs does not have."""
    joined = "-vs-".join(names)
    if len(joined) <= NAME_LENGTH:
        return joined
    words = zip(*(name.split("-") for name in names), strict=False)
    common = "-".join(each[0] for each in takewhile(lambda each: len({*each}) == 1, words))
    key = content_key(list(names))[:8]
    return f"{(common or names[0])[:NAME_LENGTH]}-{len(names)}-runs-{key}"


def _text(comparison: Comparison, curves: Path | None, folder: Path) -> str:
    """The comparison as Markdown, for a file in `folder`; `curves` is the picture of the losses."""
    runs, metrics = comparison.runs, _metrics(comparison)
    sections = [f"# Comparison of {len(runs)} runs" if len(runs) > 1 else f"# {runs[0].name}"]
    sections += [bullets([*_summary(comparison)])]
    if comparison.notes:
        sections += ["## Not finished or not comparable", bullets(comparison.notes)]
    settings = "All settings are the same, apart from names and places."
    if comparison.differing:
        rows = [
            [_cell(key), *(_cell(MISSING if value is None else value) for value in values)]
            for key, values in comparison.differing.items()
        ]
        settings = table(["Setting", *comparison.names], rows)
    sections += ["## Settings that differ", settings]
    if comparison.has_seeds:
        counts = ["Seeds", *(str(len(group.samples)) for group in comparison.groups)]
        rows = [
            [_cell(metric), *(_spread(group.spread(metric), metric) for group in comparison.groups)]
            for metric in metrics
        ]
        by_settings = table(
            ["Metric", *(each.label for each in comparison.groups)], [counts, *rows]
        )
        note = "Mean over the seeds, and the lowest and highest value."
        sections += ["## Results by settings", by_settings, note]
    if curves is not None:
        sections += ["## Curves", picture("Validation and training loss", curves, folder)]
    rows = [[_cell(metric), *(result(run, metric) for run in runs)] for metric in metrics]
    sections += ["## Results by run", table(["Metric", *comparison.names], rows)]
    # Runs by name if they share a folder.
    folders, words = {run.run_dir.parent for run in runs}, [str(run.run_dir) for run in runs]
    if len(folders) == 1:
        words = [*(run.name for run in runs), "--output-dir", str(folders.pop().parent)]
    sections += ["## Repeat", f"```sh\n{shlex.join(['infini', 'compare', *words])}\n```"]
    return "\n\n".join(filter(None, sections)) + "\n"


def _metrics(comparison: Comparison) -> list[str]:
    """All metrics of the runs: what is compared first, then losses, then the other evaluations."""
    names = dict.fromkeys(name for run in comparison.runs for name in run.results)

    def rank(name: str) -> tuple[bool, bool, bool]:
        is_loss = name.endswith(("_loss", "/loss"))
        return name != VALIDATION_LOSS, not is_loss, not name.startswith("evaluation/")

    return sorted(names, key=rank)


def _summary(comparison: Comparison) -> Iterator[str]:
    yield from map(verdict, comparison.differences)
    if comparison.differences and not comparison.has_seeds:
        yield (
            "One seed each says little: repeat the runs with other seeds before you rely on a "
            "small difference."
        )
    if not any(VALIDATION_LOSS in run.results for run in comparison.runs):
        yield "No run has been evaluated yet, so there are no losses to compare."


def verdict(difference: Difference) -> str:
    """A sentence on the losses of a group against those of the control."""
    values = list(difference.by_seed.values())
    spread = Spread.of(values)
    word = "lower" if spread.mean < 0 else "higher"
    size = f"{abs(spread.mean):.4f}"
    found = "the same to four places as" if float(size) == 0.0 else f"{size} {word} than"
    sentence = (
        f"The validation loss of {difference.group.label} is {found} that of "
        f"{difference.control.label}"
    )
    if len(values) == 1:
        return f"{sentence}, with the same seed."
    agreeing = sum((value < 0) == (spread.mean < 0) for value in values)
    return (
        f"{sentence}, on average over {len(values)} seeds ({spread.low:+.4f} to "
        f"{spread.high:+.4f}); it is {word} with {agreeing} of {len(values)}."
    )


def result(run: ComparedRun, metric: str) -> str:
    """A result of a run as text, with its interval if it has one."""
    if metric not in run.results:
        return MISSING
    text = _number(run.results[metric], metric)
    if metric not in run.intervals:
        return text
    low, high = run.intervals[metric]
    return f"{text} ({_number(low, metric)} to {_number(high, metric)})"


def _number(value: float, metric: str) -> str:
    return f"{value:,.0f}" if metric in WHOLE_NUMBERS else f"{value:,.4f}"


def _spread(spread: Spread | None, metric: str) -> str:
    if spread is None:
        return MISSING
    mean, low, high = (_number(value, metric) for value in spread)
    return mean if low == high else f"{mean} ({low} to {high})"


def _cell(text: str) -> str:
    """Text for a cell of a table, as code."""
    return f"`{text}`".replace("|", "\\|") if text != MISSING else text
