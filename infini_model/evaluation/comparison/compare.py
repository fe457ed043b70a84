"""What runs have in common, where they differ, and which losses can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infini_model.evaluation.comparison.runs import SEED, ComparedRun
from infini_model.runtime.errors import UserError
from infini_model.runtime.runs import VALIDATION_LOSS

# Up to this many differing settings name a group of runs; beyond, its first run does.
FEW_SETTINGS = 4


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
    differing = _differing([run.settings for run in runs])
    groups = _groups(runs, differing)
    first = next((run for run in runs if run.loss is not None), None)
    control = next((group for group in groups if first in group.runs), Group("", []))
    compared = list[ComparedRun]()
    for run in runs:
        obstacle = "" if first is None else _obstacle(run, _group_of(run, groups), control, first)
        if run.loss is not None and not obstacle:
            compared.append(run)
        reasons = [run.progress, obstacle and f"{obstacle}: not compared"]
        if any(reasons):
            notes.append(f"{run.name}: {'; '.join(filter(None, reasons))}")
    found = [_difference(group, control, compared) for group in groups if group is not control]
    differences = [each for each in found if each.by_seed]
    if differences:
        seeds = {seed for each in differences for seed in each.by_seed}
        alone = [run for run in compared if run.seed not in seeds]
        notes += [f"{r.name}: no other run has its seed, {r.seed}: not compared" for r in alone]
        runs = [run for run in compared if run.seed in seeds]
        differing = _differing([run.settings for run in runs])
        kept = [Group(each.label, [r for r in each.runs if r in runs]) for each in groups]
        groups = [group for group in kept if group.runs]
    return Comparison(runs, differing, groups, differences, notes)


def _differing(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    keys = dict.fromkeys(key for each in settings for key in each)
    columns = {key: [each.get(key) for each in settings] for key in keys}
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


def _group_of(run: ComparedRun, groups: Sequence[Group]) -> Group:
    return next(group for group in groups if run in group.runs)


def _obstacle(run: ComparedRun, group: Group, control: Group, first: ComparedRun) -> str:
    """Why the loss of a run of `group` is not compared; empty if it is, or has none yet.

    `first` is the first run of the control's group that is evaluated.
    """
    if run.loss is None:
        return ""
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


def _difference(group: Group, control: Group, compared: Sequence[ComparedRun]) -> Difference:
    base = control.samples
    by_seed = {
        seed: run.results[VALIDATION_LOSS] - base[seed].results[VALIDATION_LOSS]
        for seed, run in group.samples.items()
        if run in compared
    }
    return Difference(group, control, by_seed)
