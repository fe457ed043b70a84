"""Run folders: what they record, and which process works in one.

A run folder belongs to one configuration and one dataset: `config.yaml` holds the settings,
`run.json` names the dataset and the flow run that claimed the folder last. The process that works
in it holds its lock. `infini_model.runtime.claims` decides which folder a command gets.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from infini_model.config import Config, read_tree, validate
from infini_model.runtime.errors import ConfigError, DataError, UserError
from infini_model.runtime.holders import Holder, holder_of
from infini_model.runtime.storage import MANIFEST, content_key, write_json
from infini_model.runtime.stored.record import stored_holder

LOCK = ".lock"
EVALUATION = "evaluation.json"
REPORT, REPORT_PAGE = "report.md", "report.html"
INITIAL_WEIGHTS = "initial_weights.json"
# The metric by which runs are ranked and compared.
VALIDATION_LOSS = "evaluation/validation_loss"
CHECKPOINTS, MODEL = "checkpoints", "model"
STEP = re.compile(rf"{CHECKPOINTS}/step-(\d+)")


def step_key(step: int) -> str:
    """The folder of a checkpoint, below that of its run."""
    return f"{CHECKPOINTS}/step-{step}"


def record_evaluation(
    run_dir: Path,
    step: int,
    dataset_key: str,
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Record that the checkpoint of `step` has been evaluated; call after writing the report.

    `intervals` are those of 95% that some of the metrics have, low and high.
    """
    record = {"step": step, "dataset_key": dataset_key, "metrics": dict(metrics)}
    write_json(run_dir / EVALUATION, record | {"intervals": dict(intervals or {})})


def is_finished(run_dir: Path) -> bool:
    """Whether the run has reached its last step and has been evaluated there."""
    try:
        evaluated, last = _evaluated_step(run_dir), last_step(run_dir)
    except (DataError, ConfigError, ValueError, KeyError, TypeError):
        return False
    return evaluated is not None and last is not None and evaluated >= last


def _evaluated_step(run_dir: Path) -> int | None:
    """Step of the last evaluation, None if there is none. Raises `ValueError`, `KeyError`."""
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((run_dir / EVALUATION).read_text(encoding="utf-8"))
        return int(record["step"])
    return None


def last_step(run_dir: Path) -> int | None:
    """Total optimizer steps of a run; None with `training.epochs` until training starts.

    Raises `DataError` if it cannot be read.
    """
    steps = read_record(run_dir).get("max_steps")
    return None if steps is None else int(steps)


def record_last_step(run_dir: Path, step: int) -> None:
    """Record the total steps of a run that is configured by `training.epochs`."""
    if is_started(run_dir) and last_step(run_dir) is None:
        write_json(run_dir / "run.json", read_record(run_dir) | {"max_steps": step})


def read_run_config(run_dir: Path) -> Config:
    """The configuration a run was started with.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    return validate(recorded_settings(run_dir))


def recorded_settings(run_dir: Path) -> dict[str, Any]:
    """`config.yaml` of a run. Raises `DataError` if `run_dir` is not a run folder."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run folder (it has no config.yaml)")
    return read_tree(path)


def latest_run(config: Config) -> Path:
    """The folder of `run.name`, or of the newest run. Raises `DataError` if there is none."""
    run_dir = config.run.runs_dir / (config.run.name or "latest")
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such run; train one first")
    return run_dir.resolve()


def read_record(run_dir: Path) -> dict[str, Any]:
    """Contents of `run.json`. Raises `DataError` if there is none, or it is damaged."""
    path = run_dir / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{run_dir}: not a run folder (its run.json cannot be read)") from error
    except ValueError as error:
        raise DataError(f"{path}: is damaged") from error
    if not isinstance(record, dict) or "dataset" not in record:
        raise DataError(f"{path}: is damaged (it names no dataset)")
    return record


def is_started(run_dir: Path) -> bool:
    """Whether a run was started in this folder, which may be empty or absent."""
    return (run_dir / "run.json").is_file()


def weights_fingerprint(run_dir: Path) -> str | None:
    """Fingerprint of the pretrained weights that a run began from; None if none are recorded."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((run_dir / INITIAL_WEIGHTS).read_bytes())["fingerprint"])
    return None


def dataset_of(run_dir: Path) -> Path:
    """The dataset folder a run was started with.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    return Path(read_record(run_dir)["dataset"])


def dataset_here(run_dir: Path) -> Path | str:
    """The dataset of a run, for this machine: a folder, or an address if no folder is here.

    Of a run that another machine has started, it is the folder of that name in this output folder.
    A dataset in the run's own store is found there by the name of its folder.

    Raises `DataError` or `ConfigError` if `run_dir` is not a run folder.
    """
    record = read_record(run_dir)
    folder, address = Path(record["dataset"]), record.get("dataset_address")
    here = run_dir.parent.parent / "datasets" / folder.name
    if folder.exists() or here.exists():
        return folder if folder.exists() else here
    store = read_run_config(run_dir).run.datasets_store
    return folder if address is None or address == f"{store}/{folder.name}" else str(address)


def owner_of(run_dir: Path) -> str | None:
    """Id of the flow run that claimed a run last, if one did. Raises as `dataset_of` does."""
    record = read_record(run_dir).get("owner")
    return None if record is None else str(record["id"])


def run_holder(run_dir: Path) -> Holder | None:
    """The process that works in a run now, if any, perhaps on another machine.

    What other machines do with a stored run is as `refresh_runs` found it last.
    """
    return holder_of(run_dir / LOCK) or stored_holder(run_dir)


def kept_steps(steps: Iterable[int], losses: Mapping[int, float], keep: int) -> set[int]:
    """The checkpoints to keep: the `keep` newest and the one with the lowest validation loss."""
    found = sorted(steps, reverse=True)
    best = min((step for step in found if step in losses), key=losses.__getitem__, default=None)
    return {*found[:keep], *([] if best is None else [best])}


def note_run(dataset_dir: Path, run_dir: Path) -> None:
    """Note in the datasets folder that a run of another output folder uses a dataset there.

    Without it nobody who cleans up the datasets could know. A folder that cannot be written is left
    as it is.
    """
    datasets_dir = dataset_dir.resolve().parent
    run = str(run_dir.resolve())
    is_known = run_dir.resolve().parent == (datasets_dir.parent / "runs").resolve()
    if is_known or not (dataset_dir / MANIFEST).is_file():
        return
    host = socket.gethostname()
    record = {"run": run, "host": host, "dataset": dataset_dir.resolve().name}
    with contextlib.suppress(UserError):
        write_json(datasets_dir / ".runs" / f"{content_key([host, run])[:32]}.json", record)


class RunNote(NamedTuple):
    """A file that `note_run` wrote: the run, and the name of its dataset.

    `is_gone` means that the run's folder is; one of another machine may only be out of sight.
    """

    file: Path
    run_dir: Path
    dataset: str
    is_gone: bool


def noted_runs(datasets_dir: Path) -> Iterator[RunNote]:
    for path in sorted((datasets_dir / ".runs").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text(encoding="utf-8"))
            run_dir = Path(record["run"])
            is_gone = record["host"] == socket.gethostname() and not run_dir.is_dir()
            yield RunNote(path, run_dir, str(record["dataset"]), is_gone)


def find_run(runs_dir: Path, owner_id: str) -> Path | None:
    """The folder that the owner claimed, even if another owner has resumed it since."""
    former = None
    for path in sorted(runs_dir.glob("*/run.json")):
        # `latest` points to one of the other folders.
        if path.parent.is_symlink():
            continue
        try:
            record = read_record(path.parent)
        except DataError:
            continue
        if (record.get("owner") or {}).get("id") == owner_id:
            return path.parent
        if owner_id in record.get("former_owners", []):
            former = path.parent
    return former
