"""A real MLflow server on its own port, which can be killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from commands import answers, eventually, kill
from ports import free_port

from infini_model.runtime.processes import bound


class MlflowServer:
    """MLflow's server with its records and artifacts in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--workers", "1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        self._process = subprocess.Popen(
            bound(command),
            cwd=self.folder,
            # Otherwise it starts half a dozen job workers that are not needed here.
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers, "the MLflow server")

    def _answers(self) -> bool:
        assert self._process.poll() is None
        return answers(f"{self.url}/health")

    def kill(self) -> None:
        root = psutil.Process(self._process.pid)
        workers = root.children(recursive=True)
        for process in [root, *workers]:
            kill(process, signal.SIGKILL)  # One may end when its parent does.
        self._process.wait()
        # A worker that is still dying holds the port.
        psutil.wait_procs(workers)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server that runs for the duration of the block."""
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()
