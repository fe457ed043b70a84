"""Commands on existing runs, however they were started: list, resume, cancel, print logs.

They read the run folder and its lock, so that none of them needs a server. What a store has of runs
on other machines they bring here first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from flows.presets import Invocation
from flows.sweep import runs_of
from infini_model.config import load_config, merge, merge_typed, parse_override
from infini_model.config.locations import expanded
from infini_model.config.tree import RunConfig
from infini_model.runtime.branches import branch_config
from infini_model.runtime.claims import check_branch, resume_config
from infini_model.runtime.errors import StageError, UserError
from infini_model.runtime.holders import Holder
from infini_model.runtime.owner import LOOK_SECONDS
from infini_model.runtime.processes import wait_until
from infini_model.runtime.runs import (
    dataset_here,
    is_finished,
    run_holder,
)
from infini_model.runtime.stored_runs import (
    attach_unclaimed,
    await_owner,
    refresh_run,
    refresh_runs,
)
from infini_model.training.run_status import RESUMABLE, RunStatus, list_runs, saved_step

PIPE_WIDTH = 10_000
COLUMNS = ("Run", "Step", "State", "Loss", "Validation", "Branch of", "Updated")
# Columns that a narrow terminal leaves out, in turn.
LEFT_OUT = ("Updated", "Branch of", "Validation", "Loss")
# Columns of names and sentences, which are broken into lines, of this many characters at least.
WRAPPED, READABLE = ("Run", "State"), 20
# Enough to notice the flow run's state, write a checkpoint and report the end.
END_SECONDS = 120.0


def find_run_folder(places: RunConfig, name: str | None) -> Path:
    """The folder of a run, by its name or path; of the newest run if `name` is None.

    Raises `UserError` if there is none.
    """
    refresh_runs(places.runs_dir, places.store)
    run_dir = expanded(name) if name and os.sep in name else places.runs_dir / (name or "latest")
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such run; infini runs lists them")
    return run_dir.resolve()


def named_runs(asked: Invocation) -> list[Path]:
    """The folders of `comparison.runs`.

    Raises `UserError` if one does not exist, or if there is nothing to compare; `ConfigError` if
    a setting of the sweep is wrong.
    """
    sweep, named = runs_of(asked), asked.config.comparison.runs
    found = [find_run_folder(asked.config.run, name) for name in named]
    if len(set(found)) < len(found):
        raise UserError("comparison.runs: names a run twice")
    if len(found) + len(sweep) < 2:
        raise UserError(
            "name two runs or more to compare (infini runs lists them), or give settings to vary: "
            "--sweep model.memory=linear,none"
        )
    return found


def show_runs_as_json(places: RunConfig) -> None:
    """Print the runs as a JSON array of objects, with times as in ISO 8601."""
    refresh_runs(places.runs_dir, places.store)
    found = [
        {"name": run.run_dir.name, **asdict(run), "updated": _time(run).isoformat()}
        for run in list_runs(places.runs_dir)
    ]
    print(json.dumps(found, ensure_ascii=False, indent=2, default=str))


def show_runs(places: RunConfig) -> None:
    """Print a table of the runs, with the columns that fit; in a pipe all, and one line per run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Never wrapped in a pipe: its reader expects one line per run.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    refresh_runs(places.runs_dir, places.store)
    found = list_runs(places.runs_dir)
    rows = [_cells(run) for run in found]
    columns = dict(zip(COLUMNS, zip(COLUMNS, *rows, strict=True), strict=True))
    least = {
        title: min(
            max(Text.from_markup(cell).cell_len for cell in cells),
            READABLE if title in WRAPPED else PIPE_WIDTH,
        )
        for title, cells in columns.items()
    }
    if not any(run.parent for run in found):
        del columns["Branch of"]
    for title in LEFT_OUT:
        if sum(least[kept] + 2 for kept in columns) - 2 > console.width:
            columns.pop(title, None)
    table = Table(box=None, pad_edge=False)
    for title in columns:
        wraps = title in WRAPPED
        table.add_column(title, no_wrap=not wraps, min_width=least[title], overflow="fold")
    for row in zip(*(cells[1:] for cells in columns.values()), strict=True):
        table.add_row(*row)
    console.print(table)


def _cells(run: RunStatus) -> list[str]:
    from rich.markup import escape

    # With `training.epochs` the total is unknown until the training has started.
    total = "" if run.total is None else f"/{run.total:,}"
    step = f"{run.step:,}{total}" if run.step or total else ""
    state = f"{run.state}: {run.detail}" if run.detail else run.state
    losses = ["" if x is None else f"{x:.4f}" for x in (run.train_loss, run.validation_loss)]
    updated = _time(run).strftime("%Y-%m-%d %H:%M")
    parent = "" if run.parent is None else f"{run.parent}@{run.parent_step}"
    return [escape(cell) for cell in (run.run_dir.name, step, state, *losses, parent, updated)]


def _time(run: RunStatus) -> datetime:
    return datetime.fromtimestamp(run.updated).astimezone()


def to_resume(places: RunConfig, arguments: Sequence[str]) -> tuple[Path, Invocation | None]:
    """The run of `[RUN] [KEY=VALUE]...` and how to resume it by `pipeline`; None if finished.

    Without RUN, it is the most recently updated run that was interrupted or failed, not one that is
    trained and only lacks its evaluation.

    Raises `UserError` if there is none or it is in use, `ConfigError` if an override is wrong.
    """
    name, overrides = split_run(arguments)
    run_dir = _newest_resumable(places) if name is None else find_run_folder(places, name)
    await_owner(run_dir, places.store)
    if holder := run_holder(run_dir):
        raise UserError(f"{run_dir} is in use by {holder}")
    advanced = merge(places_of(run_dir, places), merge_typed(map(parse_override, overrides)))
    config = resume_config(run_dir, [advanced])
    if is_finished(run_dir):
        # Whatever of it is not in the store yet is copied on this occasion.
        with attach_unclaimed(run_dir, config):
            return run_dir, None
    parameters = {"preset": None, "resume": run_dir.name, "advanced": advanced}
    return run_dir, Invocation(parameters, config)


def split_run(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `[RUN] [KEY=VALUE]...`."""
    if arguments and "=" not in arguments[0]:
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


def to_branch(
    places: RunConfig, name: str, step: int | None, overrides: Sequence[str]
) -> Invocation:
    """Describe the training of a branch of the run `name` by `pipeline`.

    Raises `UserError` if there is no such run or checkpoint, `ConfigError` if an override is wrong.
    """
    run_dir = find_run_folder(places, name)
    advanced = merge(places_of(run_dir, places), merge_typed(map(parse_override, overrides)))
    config = branch_config(run_dir, step, [advanced])
    check_branch(config)
    branch_of = config.training.branch_of
    return Invocation({"preset": None, "branch_of": branch_of, "advanced": advanced}, config)


def places_of(run_dir: Path, places: RunConfig) -> dict[str, Any]:
    """Name where a run is: its output folder, and the store if `places` names one."""
    where = {"output_dir": str(run_dir.parent.parent)}
    return {"run": where if places.store is None else where | {"store": places.store}}


def _newest_resumable(places: RunConfig) -> Path:
    refresh_runs(places.runs_dir, places.store)
    runs = list_runs(places.runs_dir)
    for run in runs:
        if run.state in RESUMABLE:
            return run.run_dir.resolve()
    trained = next((run.run_dir.name for run in runs if run.state == "trained"), None)
    advice = f"; infini resume {trained} evaluates the trained one" if trained else ""
    raise UserError(f"{places.runs_dir}: there is no interrupted run to resume{advice}")


def cancel(run_dir: Path, store: str | None = None) -> str:
    """Stop the process that uses a run folder after it saves a checkpoint; return what is saved.

    A flow run of a deployment is cancelled through Prefect, so that the UI shows it; any other
    process gets SIGTERM.

    Raises `UserError` if the run is not running, `StageError` if it does not end in time.
    """
    holder = run_holder(run_dir)
    if holder is None:
        raise UserError(f"{run_dir}: is not running")
    if not _cancel_flow_run(run_dir, holder):
        if not holder.is_on_this_machine():
            raise UserError(f"{run_dir} is in use by {holder}; cancel it there")
        os.kill(int(holder.pid or 0), signal.SIGTERM)
    print(f"Cancelling {run_dir.name}: {holder} saves a checkpoint first", flush=True)

    def has_ended() -> bool:
        refresh_run(run_dir, store)
        return run_holder(run_dir) != holder

    if not wait_until(has_ended, every_seconds=LOOK_SECONDS, timeout_seconds=END_SECONDS):
        raise StageError(f"{run_dir}: {holder} has not ended after {END_SECONDS:g} s")
    step = saved_step(run_dir)
    return "nothing is saved" if step is None else f"step {step} is saved"


def _cancel_flow_run(run_dir: Path, holder: Holder) -> bool:
    """Set the flow run to Cancelling if it belongs to a deployment and its server answers."""
    from flows.serving.connection import use_server

    config = load_config(overrides=[{"run": {"output_dir": str(run_dir.parent.parent)}}])
    if holder.flow_run is None or use_server(config) is None:
        return False
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelling

    number = UUID(holder.flow_run)
    try:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(number)
            # A subflow ends its parent as well.
            if found.deployment_id is None and found.parent_task_run_id is None:
                return False
            client.set_flow_run_state(number, Cancelling())
    except (httpx.HTTPError, ObjectNotFound):
        return False
    return True


def print_logs(run_dir: Path, store: str | None = None, *, follow: bool) -> None:
    """Print the logs of a run's ranks; with `follow`, until the run ends.

    Raises `UserError` if there are no logs.
    """
    offsets = defaultdict[Path, int](int)

    def print_new_lines() -> bool:
        refresh_run(run_dir, store, logs=True)
        # Checked before reading, so that whatever is written before the end is printed.
        ended = not follow or run_holder(run_dir) is None
        # What the ranks say, and torchrun of them.
        for path in sorted([*run_dir.glob("logs/rank-*.log"), *run_dir.glob("logs/torchrun.log")]):
            with path.open("rb") as file:
                file.seek(offsets[path])
                lines, newline, _ = file.read().rpartition(b"\n")
            offsets[path] += sys.stdout.buffer.write(lines + newline)
        sys.stdout.buffer.flush()
        return ended

    wait_until(print_new_lines, every_seconds=LOOK_SECONDS)
    if not offsets:
        raise UserError(f"{run_dir / 'logs'}: there are no logs yet")


def dataset_of(run_dir: Path, places: RunConfig) -> Path:
    """The folder of a run's dataset, with its manifest and tokenizer and perhaps no shards."""
    from infini_model.data.lookup import finished_dataset

    dataset = dataset_here(run_dir)
    if isinstance(dataset, Path) and dataset.exists():
        return dataset
    return finished_dataset(resume_config(run_dir, [places_of(run_dir, places)])).folder
