"""Overhead of Prefect: `infini run` compared with its stages, and the latency of a submission.

- `stages`: download, plan, shard, training and evaluation as plain processes, one after the other,
  as `python -m infini_model STAGE` runs them.
- `infini run, server up`: the same through `infini run` while `infini serve` is up.
- `infini run alone`: the same with a temporary Prefect server.
- `submission`: from creating a flow run of the `evaluate` deployment, as the UI does, to Running;
  the worker polls every two seconds, and the engine imports Prefect.

All train a tiny model for two steps from scratch on an existing dataset, so nearly all of the time
is startup and shutdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Cell, Ratio, publish, run, spread, take_turns
from flows.presets import configure
from flows.serving.connection import served
from flows.serving.servers import HOST, free_port
from infini_model.config import Config, dump_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.holders import Owner
from infini_model.runtime.stage_protocol import RESULT

STAGES, UP, ALONE, SUBMISSION = "stages", "infini run, server up", "infini run alone", "submission"
# Maximum seconds on top of the stages, and of a submission.
LIMITS = {UP: 3.0, ALONE: 6.0, SUBMISSION: 5.0}
START_SECONDS = 120.0


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.orchestration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def settings(folder: Path) -> Config:
    """The debug preset, limited to two steps."""
    changes = {
        "run": {"output_dir": str(folder), "log_level": "warning"},
        "training": {"max_steps": 2},
        "launch": {"gpus": "cpu"},
        "logging": {"eval_steps": 2},
        "checkpoint": {"save_steps": 2},
    }
    return configure(["debug"], overrides=[changes])


class Peers:
    """The ways to run the stages; each method returns its seconds."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._config = config
        self._file = folder / "config.yaml"
        self._file.write_text(dump_config(config), encoding="utf-8")

    def stages(self) -> float:
        """Every stage as a separate process, without Prefect."""
        began = time.perf_counter()
        listing = self._stage("download")["listing"]
        plan = self._stage("plan", "--listing", listing)
        dataset = self._stage("shard", "--listing", listing)["folder"]
        owner = Owner(adopts=False)
        with claim_run(self._config, plan["key"], Path(dataset), owner=owner) as run_dir:
            where = ["--dataset", dataset, "--run-dir", str(run_dir)]
            run(["-m", "infini_model.training", "--config", str(self._file), *where])
            self._stage("evaluate", *where)
        return time.perf_counter() - began

    def _stage(self, name: str, *arguments: str) -> dict[str, Any]:
        module = ["-m", "infini_model", name, "--config", str(self._file)]
        printed = run([*module, *arguments]).printed
        (result,) = [line for line in printed.splitlines() if line.startswith(RESULT)]
        return dict(json.loads(result.removeprefix(RESULT)))

    def infini_run(self) -> float:
        """`infini run`, with a running server if it finds one, or a temporary one."""
        began = time.perf_counter()
        run(infini("run", "--config", str(self._file)))
        return time.perf_counter() - began

    def with_server(self) -> float:
        """`infini run` under `infini serve`."""
        with serving(self._config):
            return self.infini_run()

    def submission(self) -> float:
        """Seconds from a click on *Run* to Running."""
        with serving(self._config) as url:
            found = {each["name"]: each["id"] for each in post(url, "deployments/filter")}
            began = time.perf_counter()
            path = f"deployments/{found['evaluate']}/create_flow_run"
            flow_run = post(url, path, parameters={})["id"]
            wanted = {"flow_runs": {"id": {"any_": [flow_run]}}}
            while post(url, "flow_runs/filter", **wanted)[0]["start_time"] is None:
                if time.perf_counter() - began > START_SECONDS:
                    raise SystemExit("the flow run did not start")
                time.sleep(0.05)
            return time.perf_counter() - began


def infini(*arguments: str) -> list[str]:
    """The arguments with which Python runs `infini`."""
    program = "import sys; from flows.cli import main; sys.argv[0] = 'infini'; main()"
    return ["-c", program, *arguments]


def post(url: str, path: str, **body: Any) -> Any:
    """The response of Prefect's API."""
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=30.0) as answer:  # noqa: S310
        return json.load(answer)


@contextlib.contextmanager
def serving(config: Config) -> Iterator[str]:
    """Keep `infini serve` up while the block runs; yields the address of Prefect's API."""
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    command = [sys.executable, *infini("serve", "--output-dir", str(config.run.output_dir), *ports)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield wait_for_server(process, config, int(ports[1]))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def wait_for_server(process: subprocess.Popen[bytes], config: Config, port: int) -> str:
    """The address of the API, once `infini serve` is ready."""
    deadline = time.monotonic() + START_SECONDS
    url = f"http://{HOST}:{port}/api"
    while served(config).get("api_url") != url:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("infini serve did not start")
        time.sleep(0.1)
    return url


def main() -> None:
    """Measure in turns and publish."""
    options = parse()
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "INFINI_"))]:
        del os.environ[name]  # as of a user who has configured no server
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder))
        peers = Peers(Path(folder), config)
        peers.stages()
        work: dict[str, Callable[[], float]] = {
            STAGES: peers.stages,
            UP: peers.with_server,
            ALONE: peers.infini_run,
            SUBMISSION: peers.submission,
        }
        seconds = take_turns(work, options.turns)
    stages = seconds[STAGES]
    ratios = {
        f"(stages + {LIMITS[name]:g} s) / {name}": within(LIMITS[name], stages, seconds[name])
        for name in (UP, ALONE)
    }
    ratios[f"{LIMITS[SUBMISSION]:g} s / {SUBMISSION}"] = within(
        LIMITS[SUBMISSION], [0.0] * len(stages), seconds[SUBMISSION]
    )
    rows: list[dict[str, Cell]] = [
        {
            "": name,
            "seconds": spread(each),
            "more than the stages": spread([a - b for a, b in zip(each, stages, strict=True)]),
        }
        for name, each in seconds.items()
    ]
    publish("orchestration", "Seconds", rows, ratios, dict.fromkeys(ratios, 1.0))


def within(limit: float, base: list[float], measured: list[float]) -> Ratio:
    """The ratio of the base plus `limit` seconds to the measured seconds; met if at least 1."""
    return spread([(least + limit) / each for least, each in zip(base, measured, strict=True)])


if __name__ == "__main__":
    main()
