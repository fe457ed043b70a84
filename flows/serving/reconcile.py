"""What becomes of flow runs whose engine has ended: their true state, and no files of the engine.

A killed process cannot report its end, nor can one whose server is down: its flow run would stay
Running forever, without Retry, and so would its tasks and MLflow's run. Each engine that this
machine has started left a lock file (`flows.serving.engine`), which goes once all of this is right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Scheduled, Suspended

from flows.serving.engine import engines_dir, lock_of, log_of
from flows.serving.servers import WORK_POOL, prefect_dir
from infini_model.config import Config
from infini_model.runtime.holders import holder_of
from infini_model.runtime.runs import CHECKPOINTS, find_run, read_run
from infini_model.runtime.storage import is_locked, lock
from infini_model.training.mlflow_record import end_record
from tasks.control import end, end_tasks
from tasks.failures import TRACEBACK_LINES, explanation, saved_note

# Between two checks for dead flow runs.
EVERY_SECONDS = 5.0
# What Prefect's worker says of every run that it cancelled, and of one whose process was killed.
WORKER_MESSAGE = "Flow run was cancelled successfully."
WORKER_KILLED = "Process exited with status code: 137. "
# How the message of a crash ends that was recorded here.
CONTINUES = " continues it"
# The worker sets a cancelled run to Cancelled again, after 30 seconds at the latest, and the last
# events of a killed engine arrive late.
SETTLED = timedelta(minutes=5)


def reconcile_at_start(config: Config) -> Iterator[str]:
    """Settle what an earlier `infini serve` has left, and what a worker took and never started.

    Call it before a worker starts. Yields a line on each change.
    """
    engines = engines_dir(prefect_dir(config))
    pending, pool = {"type": {"any_": [StateType.PENDING]}}, {"any_": [WORK_POOL]}
    with get_client(sync_client=True) as client:
        yield from settle(client, engines, config)
        for flow_run in client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"state": pending}),
            work_pool_filter=WorkPoolFilter.model_validate({"name": pool}),
        ):
            if not is_locked(lock_of(engines, str(flow_run.id))):
                client.set_flow_run_state(flow_run.id, Scheduled(), force=True)
                yield f"Flow run {flow_run.name} had not started; it is rescheduled"


def reconcile_for_ever(config: Config, say: Callable[[str], None]) -> None:
    """Settle periodically; in a thread, because a dead API blocks."""
    said: list[str] = []
    with get_client(sync_client=True) as client:
        while True:
            lines: list[str] = []
            try:
                lines.extend(settle(client, engines_dir(prefect_dir(config)), config))
            except Exception as error:  # noqa: BLE001 - whatever it is, the next check may pass
                failure = f"{type(error).__name__}: {error}"
                lines.append(f"Checking for dead flow runs failed: {failure}")
            # What is still wrong has been said before.
            for line in lines:
                if line not in said:
                    say(line)
            said = lines
            time.sleep(EVERY_SECONDS)


def suspend(flow_run_id: str) -> bool:
    """Ask an engine, through the API, to save and end; False if the API does not answer."""
    message = "infini serve was stopped; Resume continues from the newest checkpoint"
    try:
        with get_client(sync_client=True) as client:
            if client.api_healthcheck() is not None:
                return False
            state = client.read_flow_run(UUID(flow_run_id)).state
            if state is not None and (state.is_running() or state.is_pending()):
                suspended: State = Suspended(message=message)
                client.set_flow_run_state(UUID(flow_run_id), suspended, force=True)
    except Exception:  # noqa: BLE001 - whatever keeps the API from answering
        return False
    return True


def settle(client: SyncPrefectClient, engines: Path, config: Config) -> Iterator[str]:
    """Correct the flow runs whose engine on this machine has ended; yields a line on each change.

    Those of other machines reveal themselves by their heartbeats. Raises `httpx.TransportError` if
    the server does not answer; whatever else is wrong with a flow run is a line.
    """
    for path in sorted(engines.glob("*.lock")):
        try:
            line = _settle(client, path, config)
        except httpx.TransportError:
            raise
        except Exception as error:  # noqa: BLE001 - no flow run may be in the way of the others
            line = f"Flow run {path.stem} cannot be corrected: {type(error).__name__}: {error}"
        if line is not None:
            yield line


def _settle(client: SyncPrefectClient, path: Path, config: Config) -> str | None:
    # While this is held, no other engine of the flow run begins.
    with lock(path, wait=False) as is_dead:
        if not is_dead:
            return None
        os.truncate(path, 0)  # it names the engine that has ended
        try:
            flow_run = client.read_flow_run(UUID(path.stem))
        except ObjectNotFound:
            return _end_unknown(path, config)
        state = cast("State", flow_run.state)
        if _is_wrong(state):
            return _correct(client, flow_run, path, config)
        if state.is_paused() and state.state_details.pause_timeout is not None:
            # The UI suspends for five minutes by default, after which Prefect would fail the run.
            # A suspended stage does this itself, but not a flow run that was between two stages.
            suspended: State = Suspended(message=state.message)
            client.set_flow_run_state(flow_run.id, suspended, force=True)
        if state.is_final():
            if not state.is_completed():
                end_tasks(client, flow_run, state)
            if state.timestamp < datetime.now(UTC) - SETTLED:
                _forget(path)
    return None


def _end_unknown(path: Path, config: Config) -> str | None:
    """Record in MLflow the end of a flow run that was deleted or that another server knows."""
    _, own = _runs_of(path.stem, config)
    if own is not None and _is_training(own):
        return None
    _forget(path)
    if own is None or not end_record(own, "FAILED"):
        return None
    return f"Run {own.name}: its process was killed; infini resume {own.name}{CONTINUES}"


def _runs_of(flow_run_id: str, config: Config) -> tuple[Path | None, Path | None]:
    """The run that a flow run has claimed, and again unless another has resumed it since."""
    run_dir = find_run(config.run.runs_dir, flow_run_id)
    owner = None if run_dir is None else read_run(run_dir).owner
    return run_dir, run_dir if owner == flow_run_id else None


def _is_training(run_dir: Path) -> bool:
    return holder_of(run_dir / CHECKPOINTS / ".lock") is not None


def _forget(path: Path) -> None:
    log_of(path).unlink(missing_ok=True)
    path.unlink()


def _is_wrong(state: State) -> bool:
    """Whether nobody has recorded yet how a flow run ended whose engine has ended."""
    message = state.message or ""
    if state.is_crashed():
        return not message.endswith(CONTINUES)
    is_by_worker = state.is_cancelled() and message == WORKER_MESSAGE
    return state.is_running() or state.is_cancelling() or is_by_worker


def _correct(
    client: SyncPrefectClient, flow_run: FlowRun, path: Path, config: Config
) -> str | None:
    """Record the end of a flow run everywhere, once its training has ended too; returns a line."""
    run_dir, own = _runs_of(path.stem, config)
    if own is not None and _is_training(own):
        return None
    was = cast("State", flow_run.state)
    saved = "" if run_dir is None else saved_note(run_dir)
    if was.is_cancelling() or was.is_cancelled():
        state: State = Cancelled(message="; ".join(filter(None, ["Cancelled", saved])))
        end(client, flow_run, state)
    else:
        message = "" if was.is_running() else (was.message or "").rstrip(".")
        is_killed = not message or message.startswith(WORKER_KILLED)
        why = "Its process was killed" if is_killed else message
        # One without a deployment cannot be retried in the UI.
        command = "the same command" if run_dir is None else f"infini resume {run_dir.name}"
        remedy = "Retry" if flow_run.deployment_id is not None else command
        next_step = "; ".join(filter(None, [saved, f"{remedy}{CONTINUES}"]))
        state = Crashed(message=f"{why}; {next_step}")
        to_do = f"{next_step[0].upper()}{next_step[1:]}."
        log = log_of(path)
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        last = said.splitlines()[-TRACEBACK_LINES:]
        end(client, flow_run, state, explanation(f"{why}.", to_do, last))
    if own is not None:
        end_record(own, "KILLED" if state.is_cancelled() else "FAILED")
    return f"Flow run {flow_run.name}: {state.message}"
