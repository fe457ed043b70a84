"""`infini serve`: Prefect, MLflow, a worker and the deployments, running until Ctrl-C.

Services that exit are restarted; trainings continue meanwhile. On shutdown, active flow runs are
suspended first, which saves their checkpoints, so that *Resume* continues them under the next
`infini serve`; then the worker ends, then the servers.

Prefect reads its settings when it is imported, so that is done once they are in the environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psutil

from flows.serving.access import choose_secret, mlflow_client, prefect_client, secret_file
from flows.serving.connection import get, served
from flows.serving.database import check_database
from flows.serving.engine import (
    ENGINES,
    GRACE_SECONDS,
    POLL_SECONDS,
    engines_dir,
    running_engines,
    serve_lock,
)
from flows.serving.servers import (
    HOST,
    Service,
    check_port,
    own_server,
    prefect_dir,
    prefect_environment,
    running_apis,
    start_mlflow,
    start_prefect,
    start_worker,
)
from infini_model.config import Config
from infini_model.config.locations import shareable_location
from infini_model.runtime.errors import UnreachableError, UserError
from infini_model.runtime.processes import deferred_signals, wait_until
from infini_model.runtime.storage import lock, make_folder, write_json
from infini_model.training.mlflow_record import PAGE, page_url


def say(line: str) -> None:
    """Print a line, even if the terminal has been closed."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def serve(
    config: Config,
    *,
    port: int,
    mlflow_port: int,
    auth: bool | None = None,
    database: str | None = None,
) -> None:
    """Run servers, worker and deployments until Ctrl-C, SIGTERM or the end of the terminal.

    `auth` says whether both servers require a secret; None keeps the previous choice. `database` is
    the address of Prefect's; None is a SQLite file in the output folder.

    Raises `UserError` if a port is in use, another `serve` is running for the same output folder,
    the database cannot be used, a server does not start, or a service exits too often.
    """
    if port == mlflow_port:
        raise UserError(f"--mlflow-port: {port} is Prefect's port (--port); choose another")
    if database is not None:
        check_database(database)
    home = make_folder(prefect_dir(config))
    with lock(serve_lock(home), wait=False) as free:
        if not free:
            url = served(config).get("api_url")
            raise UserError(
                f"run.output_dir: infini serve is already running for {config.run.output_dir}"
                + (f" at {url}" if url else "")
            )
        # Until the servers are up, there are no addresses.
        (home / "serve.json").unlink(missing_ok=True)
        check_port(port, "--port")
        check_port(mlflow_port, "--mlflow-port")
        secret = choose_secret(home, auth)
        # The environment of the worker, its flow runs and this process.
        os.environ |= {
            **prefect_environment(config),
            **prefect_client(secret),
            **mlflow_client(secret, config.tracking_uri),
            **own_server(f"http://{HOST}:{port}"),
            PAGE: f"http://{HOST}:{mlflow_port}",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "INFINI_OUTPUT_DIR": shareable_location(config.run.output_dir, config.run.store),
            ENGINES: str(make_folder(engines_dir(home))),
        }
        with (
            contextlib.suppress(KeyboardInterrupt),
            closing(start_prefect(config, port, secret, database)) as prefect,
            closing(start_mlflow(config, mlflow_port, secret)) as mlflow,
        ):
            _run(config, secret, prefect, mlflow)


def _run(config: Config, secret: str | None, prefect: Service, mlflow: Service) -> None:
    """Deploy to the servers, start the worker, and keep all three up until a signal arrives."""
    from flows.serving.deploy import deploy
    from flows.serving.reconcile import reconcile_at_start, reconcile_for_ever

    mlflow.wait_until_up()
    prefect.wait_until_up()
    deploy(os.environ["PREFECT_API_URL"])
    for line in reconcile_at_start(config):
        say(line)
    home = prefect_dir(config)
    with closing(start_worker(config, prefect)) as worker:
        threading.Thread(target=reconcile_for_ever, args=(config, say), daemon=True).start()
        addresses = {"api_url": os.environ["PREFECT_API_URL"], "mlflow_url": mlflow.url}
        write_json(home / "serve.json", addresses)
        say(f"Prefect UI  {prefect.url}/v2")
        say(f"MLflow      {_experiment_page(mlflow, config, secret)}")
        say(f"Other programs:  export PREFECT_API_URL={prefect.url}/api")
        if secret is not None:
            say(f'                 export PREFECT_API_AUTH_STRING="$(cat {secret_file(home)})"')
        say("Ready: run the deployments from the UI. Ctrl-C suspends active runs and stops all.")
        listed = set[str]()
        with deferred_signals() as signals:
            try:
                while not signals:
                    apis = running_apis(home)
                    for line in sorted(apis - listed):
                        say(f"OpenAI API  {line}")
                    listed = apis
                    for service in (prefect, mlflow, worker):
                        service.restart_if_exited(say, time.monotonic())
                    time.sleep(POLL_SECONDS)
            finally:
                _stop_flow_runs(engines_dir(home), signals)


def _experiment_page(mlflow: Service, config: Config, secret: str | None) -> str:
    """The address of the experiment's page; of the server if the experiment is not found."""
    name, uri = quote(config.tracking.experiment_name), config.tracking_uri
    base = uri.rstrip("/") if uri.startswith("http") else mlflow.url
    url = f"{base}/api/2.0/mlflow/experiments/get-by-name?experiment_name={name}"
    try:
        return page_url(base, get(url, secret).json()["experiment"]["experiment_id"])
    except (UnreachableError, ValueError, KeyError):
        return base


def _stop_flow_runs(engines: Path, signals: Sequence[int]) -> None:
    """Suspend active flow runs and wait for their checkpoints, until a second signal."""
    if not running_engines(engines):
        return
    from flows.serving.reconcile import suspend

    before_waiting, terminated = len(signals), set[int]()
    say("Waiting for the flow runs to save their checkpoints (Ctrl-C again kills them)")

    def have_ended() -> bool:
        running = running_engines(engines)
        if not running or len(signals) > before_waiting:
            return True
        for flow_run_id, pid in running.items():
            if not suspend(flow_run_id) and pid not in terminated:
                terminated.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return False

    wait_until(have_ended, every_seconds=POLL_SECONDS, timeout_seconds=GRACE_SECONDS)
    for pid in running_engines(engines).values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                one.kill()
