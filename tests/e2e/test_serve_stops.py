"""The end of `infini serve`, asked for or not, in the middle of a training."""

import signal
import socket
from pathlib import Path

import psutil
import pytest
from commands import alive, eventually, kill, processes_about
from curves import repeatable
from serving import ENGINE, TRAINER, serve
from trials import STEPS, Make, Start, Undisturbed

from flows.serving.services import HOST, free_port

pytestmark = pytest.mark.slow


def test_ctrl_c_suspends_the_training_and_after_sigkill_it_can_be_retried_to_the_same_bits(
    undisturbed: Undisturbed, start: Start, pipeline: Make, tmp_path: Path
) -> None:
    output, ports = tmp_path / "output", (free_port(), free_port())
    serving = serve(start, output, ports)
    slow = {"eval_steps": 40, "eval_batches": 2}
    flow_run = serving.create("pipeline", advanced=pipeline(output, training=slow))
    serving.wait_for_log(flow_run, "Step [5/")
    serving.stop()
    assert "Waiting for the flow runs to save their checkpoints" in serving.running.output
    assert not processes_about(output)
    (saved,) = output.glob("runs/quickstart-1/checkpoints/step-*")

    serving = serve(start, output, ports)
    state = serving.state(flow_run)
    assert state["name"] == "Suspended"
    assert saved.name.replace("-", " ") in state["message"]
    serving.resume(flow_run)
    eventually(lambda: serving.processes(TRAINER) != [], "the training", seconds=60)
    everyone = [*serving.running.tree(), *serving.processes(ENGINE), *serving.processes(TRAINER)]
    kill(psutil.Process(serving.running.process.pid), signal.SIGKILL)
    eventually(lambda: not alive(everyone), "the end of all processes", seconds=90)
    for port in ports:
        with socket.create_server((HOST, port)):
            pass

    serving = serve(start, output, ports)
    assert serving.state(flow_run)["name"] == "Crashed"
    serving.retry(flow_run)
    serving.wait_for_state(flow_run, "Completed", seconds=120)
    (run_dir,) = output.glob("runs/*-*")
    assert (run_dir / "checkpoints" / f"step-{STEPS}").is_dir()
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    serving.stop()
