"""The metrics of a run: a file, and sinks that follow it and may be slow, silent or down.

MLflow's server is real, behind a proxy that holds requests or drops them.
"""

import http.client
import http.server
import json
import logging
import math
import threading
from collections import Counter

import pytest
from commands import PATIENCE, eventually
from mlflow_server import mlflow_server
from records import Record

from infini_model.runtime.metrics_file import MetricsFile, read_metrics, read_newest
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.callbacks.sinks import Follower, TensorBoardSink

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
NAMES = ("train/loss", "train/grad_norm", *(f"memory/layer_{i}/gate_mean" for i in range(10)))


def write(run_dir, steps, resumed_step=None):
    file = MetricsFile(run_dir, resumed_step)
    for step in steps:
        file.append(step, {"train/loss": 10.0 - step})
    file.close()


def test_each_step_is_in_the_file_once_whatever_the_training_was_interrupted_by(tmp_path):
    write(tmp_path, range(1, 8))
    # After a kill: half a line, and steps after the checkpoint, which are repeated.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "train/lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8))
    write(tmp_path, range(5, 10), resumed_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 10))
    # A training from scratch.
    write(tmp_path, [0])
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]


def test_metrics_recorded_at_this_step_are_known_after_a_restart(tmp_path):
    file = MetricsFile(tmp_path, None)
    file.append(5, {"train/loss": 1.0})
    file.append(5, {"validation/loss": 2.0})
    file.append(6, {"train/loss": 1.0})
    file.close()
    again = MetricsFile(tmp_path, 5)
    assert again.has(5, "validation/loss")
    assert not again.has(5, "test/loss")
    again.close()


def test_the_newest_values_are_found_however_far_back_they_are(tmp_path):
    assert read_newest(tmp_path, "step") == {}
    lines = [{"step": 1, "validation/loss": 7.5}]
    lines += [{"step": step, "train/loss": 1 / step} for step in range(2, 20_001)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 20001, "trai')
    newest = read_newest(tmp_path, "step", "train/loss", "validation/loss", "test/loss")
    assert newest == {"step": 20_000, "train/loss": 1 / 20_000, "validation/loss": 7.5}


class Unreliable:
    """A sink that is down for its first calls."""

    name = "Unreliable"

    def __init__(self, failures):
        self.failures = failures
        self.taken = []
        self.status = None
        self.tried = threading.Event()

    def deliver(self, lines):
        self.tried.set()
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("connection refused")
        self.taken += [line["step"] for line in lines]

    def finish(self, status):
        self.status = status


@pytest.mark.parametrize("failures", [1, 10**9], ids=["recovers", "stays down"])
def test_a_sink_that_was_down_gets_what_it_missed_once_or_is_given_up(tmp_path, caplog, failures):
    write(tmp_path, range(1, 6))
    sink = Unreliable(failures)
    follower = Follower(tmp_path, sink)
    with caplog.at_level(logging.WARNING):
        follower.start()
        # The run ends once the sink has been tried, and may take forever to finish.
        assert sink.tried.wait(PATIENCE)
        follower.end("FINISHED", math.inf)
        follower.join(PATIENCE)
    assert not follower.is_alive()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    if failures == 1:
        assert (follower.done, sink.taken, sink.status) == (True, [1, 2, 3, 4, 5], "FINISHED")
    else:
        assert (follower.done, sink.taken, sink.status) == (False, [], None)


def test_tensorboard_has_each_step_once_across_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    write(tmp_path, range(1, 8))
    for resumed_step, steps in ((None, range(1, 8)), (4, range(5, 10))):
        write(tmp_path, steps, resumed_step)
        sink = TensorBoardSink(folder)
        sink.deliver(read_metrics(tmp_path))
        sink.finish("FINISHED")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (step, 10.0 - step) for step in range(1, 10)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of an MLflow server."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running.port


class Proxy:
    """A proxy that forwards requests, or does with them what `fate` says.

    They are "answered", "dropped" as if the server were down, or "unanswered": the server handles
    them and the client gets no response. While they are held (`hold`) their fate is open. `met`
    counts how many have "arrived" and met each fate.
    """

    def __init__(self, server_port):
        self.fate, self.met = "answered", Counter()
        self._passes = threading.Event()
        self._passes.set()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def forward(self):
                self.close_connection = True
                proxy.met["arrived"] += 1
                proxy._passes.wait()
                fate = proxy.fate
                if fate != "dropped":
                    self.answer(discard=fate == "unanswered")
                proxy.met[fate] += 1

            def answer(self, discard):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                inner = http.client.HTTPConnection("127.0.0.1", server_port, timeout=PATIENCE)
                inner.request(self.command, self.path, body, dict(self.headers))
                answer = inner.getresponse()
                reply = answer.read()
                inner.close()
                if discard:
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_PATCH = forward  # noqa: N815

        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self._listener.handle_error = lambda *_: None
        self.port = self._listener.server_port
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def hold(self):
        self._passes.clear()

    def release(self):
        self._passes.set()

    def wait_for(self, what):
        """Wait until a request has arrived, or met a fate."""
        eventually(lambda: self.met[what] > 0, f"a request that was {what}")

    def close(self):
        self.fate = "dropped"
        self.release()
        self._listener.shutdown()
        self._listener.server_close()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def record(proxy, make_config, tmp_path, monkeypatch):
    """Starts the record of a run in tmp_path/run, tracked through the proxy."""
    # A client that gave up by itself would hide that somebody waits for it.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(int(10 * PATIENCE)))
    uri = f"http://127.0.0.1:{proxy.port}"
    config = make_config(tracking={"mlflow": True, "tensorboard": False, "tracking_uri": uri})
    return lambda resumed_step=None: Record(tmp_path / "run", config, DATASET, resumed_step)


def take_steps(metrics, steps):
    """Record steps."""
    for step in steps:
        metrics.append(step, dict.fromkeys(NAMES, step + 0.5))


def histories(server, run_dir):
    """Steps of each metric, according to the server."""
    from mlflow import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{server}")
    run_id = read_mlflow_record(run_dir)["run_id"]
    status = client.get_run(run_id).info.status
    return status, {
        name: sorted(m.step for m in client.get_metric_history(run_id, name)) for name in NAMES
    }


def complete(steps):
    return {name: list(steps) for name in NAMES}


def until_delivered(run_dir, step):
    delivered = lambda: read_mlflow_record(run_dir).get("delivered_step") == step  # noqa: E731
    eventually(delivered, f"MLflow has step {step}")


@pytest.mark.story
def test_a_slow_server_delays_no_step(proxy, record, server, tmp_path):
    proxy.hold()
    metrics = record()
    proxy.wait_for("arrived")
    take_steps(metrics, range(1, 51))
    assert proxy.met["answered"] == 0
    proxy.release()
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


@pytest.mark.story
def test_a_server_that_is_silent_at_the_end_gets_the_rest_on_resume(
    proxy, record, server, tmp_path
):
    proxy.hold()
    others = set(threading.enumerate())
    metrics = record()
    (follower,) = (t for t in set(threading.enumerate()) - others if "follower" in t.name)
    proxy.wait_for("arrived")
    take_steps(metrics, range(1, 51))
    metrics.close("FINISHED", timeout_seconds=1.0)
    assert proxy.met["answered"] == 0
    proxy.fate = "dropped"
    proxy.release()
    follower.join()
    proxy.fate = "answered"
    again = record(resumed_step=50)
    again.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


@pytest.mark.story
def test_a_server_that_is_down_and_loses_answers_gets_each_point_once(
    proxy, record, server, tmp_path
):
    proxy.fate = "dropped"
    metrics = record()
    take_steps(metrics, range(1, 101))
    proxy.wait_for("dropped")
    proxy.fate = "answered"
    until_delivered(tmp_path / "run", 100)
    # Now it accepts data without responding, then it is down again, then it is back.
    proxy.fate = "unanswered"
    take_steps(metrics, range(101, 201))
    proxy.wait_for("unanswered")
    proxy.met.clear()
    proxy.fate = "dropped"
    take_steps(metrics, range(201, 301))
    proxy.wait_for("dropped")
    proxy.fate = "answered"
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 301)))


@pytest.mark.story
def test_a_record_left_running_by_a_kill_is_corrected_on_resume(proxy, record, server, tmp_path):
    metrics = record()
    take_steps(metrics, range(1, 51))
    until_delivered(tmp_path / "run", 50)
    # It is not closed, as after SIGKILL. The steps after the checkpoint are repeated.
    assert histories(server, tmp_path / "run")[0] == "RUNNING"
    again = record(resumed_step=40)
    take_steps(again, range(41, 81))
    again.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 81)))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 81))
