"""`infini serve`: Prefect, MLflow, a worker and the deployments, kept up until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence

from flows.serving.deploy import WORK_POOL, deploy
from flows.serving.services import (
    Service,
    check_port,
    ending,
    prefect_dir,
    prefect_environment,
    start,
    start_mlflow,
    start_prefect,
    wait_until_up,
)
from infini_model.config import Config
from infini_model.errors import UserError
from infini_model.storage import lock, make_folder, write_json


def _start_worker(config: Config, env: Mapping[str, str]) -> Service:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", WORK_POOL]
    return start("the worker", command, log=prefect_dir(config) / "worker.log", env=env)


def _first_end(services: Sequence[Service]) -> Service:
    """Wait until one of the services ends, which none should."""
    while True:
        for service in services:
            if service.process.poll() is not None:
                return service
        time.sleep(0.5)


def serve(config: Config, *, port: int, mlflow_port: int) -> None:
    """Keep server, MLflow page, worker and deployments up until Ctrl-C; print the addresses.

    Raises `UserError` if a port is in use, another `serve` is up for the same output folder, or
    one of the processes ends.
    """
    home = make_folder(prefect_dir(config))
    with lock(home / "serve.lock", wait=False) as free:
        if not free:
            raise UserError(
                f"run.output_dir: infini serve is up for {config.run.output_dir} already"
            )
        check_port(port, "--port")
        check_port(mlflow_port, "--mlflow-port")
        services: list[Service] = []
        with ending(services), contextlib.suppress(KeyboardInterrupt):
            prefect = start_prefect(config, port)
            services.append(prefect)
            # A training that makes the same tables would take this lock too.
            with lock(config.run.output_dir / "mlflow" / ".lock"):
                mlflow = start_mlflow(config, mlflow_port)
                services.append(mlflow)
                wait_until_up(mlflow, "/health")
            wait_until_up(prefect, "/api/health")
            env = {
                **prefect_environment(config),
                "PREFECT_API_URL": f"{prefect.url}/api",
                "INFINI_OUTPUT_DIR": str(config.run.output_dir.resolve()),
            }
            os.environ.update(env)
            deploy(env["PREFECT_API_URL"])
            services.append(_start_worker(config, env))
            write_json(home / "serve.json", {"api_url": env["PREFECT_API_URL"]})
            print(f"Prefect UI  {prefect.url}", flush=True)
            print(f"MLflow      {mlflow.url}", flush=True)
            print("Ready: run the deployments from the UI. Ctrl-C ends all of it.", flush=True)
            ended = _first_end(services)
            raise UserError(f"{ended.name} has ended; see {ended.log}")
