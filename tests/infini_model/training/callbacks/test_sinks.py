"""An MLflow server that is slow, down, or dies: training continues, each point arrives once.

The server is real, behind a proxy that holds requests or drops them.
"""

import http.client
import http.server
import threading
from collections import Counter

import pytest
from commands import PATIENCE, eventually
from mlflow_server import mlflow_server
from records import Record

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.mlflow_record import read_mlflow_record

pytestmark = pytest.mark.story

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
NAMES = ("train/loss", "train/grad_norm", *(f"memory/layer_{i}/gate_mean" for i in range(10)))


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """An MLflow server."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def server(mlflow):
    """The port of that server."""
    return mlflow.port


class Proxy:
    """A proxy that forwards requests, or does with them what `fate` says.

    They are "answered", "dropped" as if the server were down, or "unanswered": the server handles
    them and the client gets no response. While they are held (`hold`) their fate is open. `met`
    counts how many have "arrived" and met each fate; one "failed" if there was no server to ask.
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
                try:
                    if fate != "dropped":
                        self.answer(discard=fate == "unanswered")
                except OSError:
                    fate = "failed"
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


def test_a_slow_server_does_not_delay_steps(proxy, record, server, tmp_path):
    proxy.hold()
    metrics = record()
    proxy.wait_for("arrived")
    take_steps(metrics, range(1, 51))
    assert proxy.met["answered"] == 0
    proxy.release()
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


def test_an_unresponsive_server_does_not_block_the_end_of_training(proxy, record, server, tmp_path):
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


def test_a_server_that_is_down_from_the_start_gets_everything_once_it_is_up(
    proxy, record, server, tmp_path
):
    proxy.fate = "dropped"
    metrics = record()
    take_steps(metrics, range(1, 51))
    proxy.wait_for("dropped")
    proxy.fate = "answered"
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


def test_a_server_that_dies_half_way_gets_each_point_once(proxy, record, server, tmp_path):
    metrics = record()
    take_steps(metrics, range(1, 101))
    until_delivered(tmp_path / "run", 100)
    # First it accepts data without responding, then it is down, then it is back.
    proxy.fate = "unanswered"
    take_steps(metrics, range(101, 201))
    proxy.wait_for("unanswered")
    proxy.fate = "dropped"
    take_steps(metrics, range(201, 301))
    proxy.wait_for("dropped")
    proxy.fate = "answered"
    take_steps(metrics, range(301, 401))
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 401)))


def test_a_killed_and_restarted_server_gets_each_point_once(
    mlflow, proxy, record, server, tmp_path
):
    metrics = record()
    take_steps(metrics, range(1, 101))
    until_delivered(tmp_path / "run", 100)
    mlflow.kill()
    take_steps(metrics, range(101, 201))
    proxy.wait_for("failed")
    mlflow.start()
    take_steps(metrics, range(201, 301))
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 301)))


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
