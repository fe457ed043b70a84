"""`infini serve` stopped or killed in the middle of a training."""

import functools
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from commands import Environment, alive, eventually, kill, processes_about
from curves import repeatable
from ports import free_port
from serving import ENGINE, serve
from stopping import Halt, is_pending
from trials import STEPS, Make, Start, Undisturbed

from flows.serving.services import HOST

pytestmark = pytest.mark.story


def test_ctrl_c_suspends_the_training_and_after_sigkill_it_can_be_retried_to_the_same_bits(
    undisturbed: Undisturbed,
    start: Start,
    pipeline: Make,
    alone: Environment,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    output, ports = with_tables(tmp_path / "output"), (free_port(), free_port())
    halt = Halt(tmp_path / "halt", 10, 60)
    halting = functools.partial(start, env=alone | halt.environment)
    serving = serve(halting, output, ports)
    # The rate of `undisturbed`, which has no preset.
    rate, rarely = {"learning_rate": 1e-3}, {"save_steps": 10 * STEPS}
    tree = pipeline(output, training=rate, checkpoint=rarely)
    flow_run = serving.create("pipeline", advanced=tree)
    run_dir = output / "runs" / "quickstart-1"
    (trainer,) = halt.wait()
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(serving.stop)
        eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
        halt.resume()
        stopping.result()
    assert "Waiting for the flow runs to save their checkpoints" in serving.running.output
    eventually(lambda: not processes_about(output), "the end of all processes")
    (saved,) = (run_dir / "checkpoints").glob("step-*")

    serving = serve(halting, output, ports)
    state = serving.state(flow_run)
    assert state["name"] == "Suspended"
    assert saved.name.replace("-", " ") in state["message"]
    serving.resume(flow_run)
    (trainer,) = halt.wait()
    everyone = [*serving.running.tree(), *serving.processes(ENGINE), trainer]
    kill(psutil.Process(serving.running.process.pid), signal.SIGKILL)
    eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
    halt.resume()
    eventually(lambda: not alive(everyone), "the end of all processes")
    for port in ports:
        with socket.create_server((HOST, port)):
            pass

    serving = serve(start, output, ports)
    assert serving.state(flow_run)["name"] == "Crashed"
    serving.retry(flow_run)
    serving.wait_for_state(flow_run, "Completed")
    assert [path.name for path in (output / "runs").glob("*-*")] == ["quickstart-1"]
    assert (run_dir / "checkpoints" / f"step-{STEPS}").is_dir()
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    serving.stop()
