"""`infini serve`: Prefect, MLflow, a worker and the deployments, running until Ctrl-C.

Services that exit are restarted; trainings continue meanwhile. On shutdown, active flow runs are
suspended first, which saves their checkpoints, so that *Resume* continues them under the next
`infini serve`; then the worker ends, then the servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil

from flows.serving import engine
from flows.serving.access import OPEN_ACCESS, Access, choose_access, secret_file
from flows.serving.connection import served_url
from flows.serving.database import check_database
from flows.serving.deploy import WORK_POOL, deploy
from flows.serving.services import (
    HOST,
    Service,
    answers,
    check_port,
    engines_dir,
    experiment_page,
    own_server,
    prefect_dir,
    prefect_environment,
    start,
    start_mlflow,
    start_prefect,
    wait_until_up,
)
from flows.serving.supervise import Supervised
from infini_model.config import Config
from infini_model.config.locations import shareable_location
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import wait_until
from infini_model.runtime.storage import lock, make_folder, write_json
from infini_model.training.callbacks.mlflow_record import PAGE

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.5
# Between two checks for dead flow runs.
RECONCILE_SECONDS = 5.0
# Time for flow runs to save a checkpoint and end, before SIGKILL.
SAVE_SECONDS = 75.0


def say(line: str) -> None:
    """Print a line, even if the terminal has been closed."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


@dataclass(frozen=True)
class Options:
    """The options of `infini serve` besides the configuration.

    Attributes:
        port: Port of Prefect's API and UI.
        mlflow_port: Port of MLflow's API and UI.
        auth: Whether both require a secret; None keeps the previous choice.
        database: Address of Prefect's database; None is a SQLite file in the output folder.
    """

    port: int
    mlflow_port: int
    auth: bool | None = None
    database: str | None = None


def serve(config: Config, options: Options) -> None:
    """Run servers, worker and deployments until Ctrl-C, SIGTERM or the end of the terminal.

    Raises `UserError` if a port is in use, if another `serve` is running for the same output
    folder, if a server does not start, or if a service exits too often.
    """
    if options.port == options.mlflow_port:
        raise UserError(f"--mlflow-port: {options.port} is Prefect's port (--port); choose another")
    if options.database is not None:
        check_database(options.database)
    home = make_folder(prefect_dir(config))
    with lock(home / "serve.lock", wait=False) as free:
        if not free:
            url = served_url(config)
            raise UserError(
                f"run.output_dir: infini serve is already running for {config.run.output_dir}"
                + (f" at {url}" if url else "")
            )
        # Until the servers are up, there are no addresses.
        (home / "serve.json").unlink(missing_ok=True)
        check_port(options.port, "--port")
        check_port(options.mlflow_port, "--mlflow-port")
        access = choose_access(home, options.auth)
        engines = make_folder(engines_dir(config))
        env = _environment(config, engines, options, access)
        os.environ.update(env)
        with contextlib.ExitStack() as started, contextlib.suppress(KeyboardInterrupt):
            services = _start_all(config, options, access, engines, started)
            addresses = {"api_url": env["PREFECT_API_URL"], "mlflow_url": env[PAGE]}
            write_json(home / "serve.json", addresses)
            page = experiment_page(services[1].service, config, access)
            _print_addresses(
                services[0].service, page, secret_file(home) if access != OPEN_ACCESS else None
            )
            with _collected_stops() as signals:
                try:
                    _supervise(services, signals)
                finally:
                    _stop_flow_runs(engines, signals)


def _environment(config: Config, engines: Path, options: Options, access: Access) -> dict[str, str]:
    """The environment of the worker, its flow runs and this process."""
    return {
        **prefect_environment(config),
        **access.prefect_client(),
        **access.mlflow_client(config.tracking_uri),
        **own_server(f"http://{HOST}:{options.port}"),
        PAGE: f"http://{HOST}:{options.mlflow_port}",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "INFINI_OUTPUT_DIR": shareable_location(config.run.output_dir, config.run.store),
        engine.ENGINES: str(engines),
        engine.SERVE: engine.serve_process(),
    }


def _start_all(
    config: Config,
    options: Options,
    access: Access,
    engines: Path,
    started: contextlib.ExitStack,
) -> list[Supervised]:
    """Start Prefect's server, MLflow's, and, once the deployments are up to date, the worker.

    Each is returned in that order, and entered into `started`, which ends it.
    """

    def keep(start: Callable[[], Service], needs: Callable[[], bool] = lambda: True) -> Supervised:
        return started.enter_context(contextlib.closing(Supervised(start, needs)))

    prefect = keep(lambda: start_prefect(config, options.port, access, options.database))
    mlflow = keep(lambda: start_mlflow(config, options.mlflow_port, access))
    wait_until_up(mlflow.service, "/health")
    wait_until_up(prefect.service, "/api/health")
    deploy(os.environ["PREFECT_API_URL"])
    _reconcile_at_start(config, engines)
    worker = keep(lambda: _start_worker(config), lambda: answers(prefect.service))
    threading.Thread(target=_reconcile, args=(config, engines), daemon=True).start()
    return [prefect, mlflow, worker]


def _start_worker(config: Config) -> Service:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL]
    return start("the worker", command, log=prefect_dir(config) / "worker.log", env={})


def _print_addresses(prefect: Service, mlflow_page: str, secret: Path | None) -> None:
    say(f"Prefect UI  {prefect.url}/v2")
    say(f"MLflow      {mlflow_page}")
    say(f"Other programs:  export PREFECT_API_URL={prefect.url}/api")
    if secret:
        say(f'                 export PREFECT_API_AUTH_STRING="$(cat {secret})"')
    say("Ready: run the deployments from the UI. Ctrl-C suspends active runs and stops everything.")


def _supervise(services: list[Supervised], signals: list[int]) -> None:
    """Restart services that exit until a signal arrives."""
    while not signals:
        for supervised in services:
            supervised.check(say)
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _collected_stops() -> Iterator[list[int]]:
    """Collect stop signals in a list while the block runs, without any other effect."""
    signals: list[int] = []
    previous = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: signals.append(number))
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _reconcile_at_start(config: Config, engines: Path) -> None:
    from prefect.client.orchestration import get_client

    from flows.serving.reconcile import reschedule_lost_runs, settle

    with get_client(sync_client=True) as client:
        for line in settle(client, engines, config):
            say(line)
        for flow_run in reschedule_lost_runs(client, engines):
            say(f"Flow run {flow_run.name} had not started; it is rescheduled")


def _reconcile(config: Config, engines: Path) -> None:
    """Check for dead runs periodically; in a thread, because a dead API blocks."""
    from prefect.client.orchestration import get_client

    from flows.serving.reconcile import settle

    said: list[str] = []
    with get_client(sync_client=True) as client:
        while True:
            lines: list[str] = []
            try:
                lines.extend(settle(client, engines, config))
            except Exception as error:  # noqa: BLE001 - whatever it is, the next check may pass
                failure = f"{type(error).__name__}: {error}"
                lines.append(f"Checking for dead flow runs failed: {failure}")
            # What is still wrong has been said before.
            for line in lines:
                if line not in said:
                    say(line)
            said = lines
            time.sleep(RECONCILE_SECONDS)


def _stop_flow_runs(engines: Path, signals: list[int]) -> None:
    """Suspend active flow runs and wait for their checkpoints, until a second signal."""
    if not engine.running_engines(engines):
        return
    before_waiting, terminated = len(signals), set[int]()
    say("Waiting for the flow runs to save their checkpoints (Ctrl-C again kills them)")

    def have_ended() -> bool:
        running = engine.running_engines(engines)
        if not running or len(signals) > before_waiting:
            return True
        for flow_run_id, pid in running.items():
            if not _suspend(flow_run_id) and pid not in terminated:
                terminated.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return False

    wait_until(have_ended, every_seconds=POLL_SECONDS, timeout_seconds=SAVE_SECONDS)
    for pid in engine.running_engines(engines).values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                one.kill()


def _suspend(flow_run_id: str) -> bool:
    """Ask an engine, through the API, to save and end; False if the API does not answer."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import State
    from prefect.states import Suspended

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
