"""`infini serve` stopped or killed in the middle of a training."""

import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from commands import alive, eventually, kill, processes_about
from curves import repeatable
from serving import ENGINE, TRAINER, serve
from trials import STEPS, Make, Start, Undisturbed, is_pending

from flows.serving.services import HOST, free_port
from infini_model.runtime.metrics_file import read_metrics

pytestmark = pytest.mark.story


def test_ctrl_c_suspends_the_training_and_after_sigkill_it_can_be_retried_to_the_same_bits(
    undisturbed: Undisturbed,
    start: Start,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    output, ports = with_tables(tmp_path / "output"), (free_port(), free_port())
    serving = serve(start, output, ports)
    # The rate of `undisturbed`, which has no preset.
    rate, rarely = {"learning_rate": 1e-3}, {"save_steps": 10 * STEPS}
    tree = pipeline(output, training=rate, checkpoint=rarely)
    flow_run = serving.create("pipeline", advanced=tree)
    run_dir = output / "runs" / "quickstart-1"
    eventually(lambda: len(read_metrics(run_dir)) > 5, "some steps", seconds=120)
    # It would have ended before being asked to.
    (trainer,) = serving.processes(TRAINER)
    trainer.suspend()
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(serving.stop)
        eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM", seconds=60)
        trainer.resume()
        stopping.result()
    assert "Waiting for the flow runs to save their checkpoints" in serving.running.output
    assert not processes_about(output)
    (saved,) = (run_dir / "checkpoints").glob("step-*")

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
    assert [path.name for path in (output / "runs").glob("*-*")] == ["quickstart-1"]
    assert (run_dir / "checkpoints" / f"step-{STEPS}").is_dir()
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    serving.stop()
