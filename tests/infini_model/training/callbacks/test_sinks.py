"""An MLflow server that is slow, down, or dies: training continues, each point arrives once.

The server is real, behind a proxy that can be closed or delayed.
"""

import http.client
import http.server
import threading
import time

import pytest
from commands import eventually
from mlflow_server import free_port, mlflow_server
from records import Record

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.mlflow_record import read_mlflow_record

pytestmark = pytest.mark.story

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
NAMES = ("train/loss", "train/grad_norm", *(f"memory/layer_{i}/gate_mean" for i in range(10)))

# A step this slow has waited for a request: the proxy's delay is longer. The margin is for busy
# machines, where writing a line of metrics.jsonl takes a moment, too.
BLOCKED = 0.45


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
    """A proxy that forwards requests after `delay` seconds, without a response if `dumb`."""

    def __init__(self, server_port):
        self.delay, self.dumb, self.requests = 0.0, False, 0
        self.port = free_port()
        self._server_port = server_port
        self._listener = None

    def open(self):
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def forward(self):
                proxy.requests += 1
                time.sleep(proxy.delay)
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                inner = http.client.HTTPConnection("127.0.0.1", proxy._server_port, timeout=60)
                inner.request(self.command, self.path, body, dict(self.headers))
                answer = inner.getresponse()
                reply = answer.read()
                inner.close()
                self.close_connection = True
                if proxy.dumb or proxy._listener is None:
                    # The server handled the request, but the client gets no response.
                    self.connection.close()
                    return
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_POST = do_PATCH = forward  # noqa: N815

        self._listener = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._listener.daemon_threads = True
        self._listener.handle_error = lambda *_: None
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def close(self):
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown()
            listener.server_close()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def record(proxy, make_config, tmp_path):
    """Starts the record of a run in tmp_path/run, tracked through the proxy."""
    uri = f"http://127.0.0.1:{proxy.port}"
    config = make_config(tracking={"mlflow": True, "tensorboard": False, "tracking_uri": uri})
    return lambda resumed_step=None: Record(tmp_path / "run", config, DATASET, resumed_step)


def take_steps(metrics, steps, pause=0.0):
    """Record steps; returns the seconds of the slowest one without its pause."""
    longest = 0.0
    for step in steps:
        began = time.monotonic()
        metrics.append(step, dict.fromkeys(NAMES, step + 0.5))
        longest = max(longest, time.monotonic() - began)
        time.sleep(pause)
    return longest


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
    eventually(delivered, f"MLflow has step {step}", seconds=120)


def test_a_slow_server_does_not_delay_steps(proxy, record, server, tmp_path):
    proxy.delay = 0.5
    proxy.open()
    metrics = record()
    assert take_steps(metrics, range(1, 301), pause=0.005) < BLOCKED
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 301)))


def test_an_unresponsive_server_does_not_block_the_end_of_training(proxy, record, server, tmp_path):
    proxy.delay = 3600.0
    proxy.open()
    metrics = record()
    assert take_steps(metrics, range(1, 51), pause=0.005) < BLOCKED
    eventually(lambda: proxy.requests > 0, "a request arrives", seconds=120)
    began = time.monotonic()
    metrics.close("FINISHED", timeout_seconds=2.0)
    assert time.monotonic() - began < 5.0
    proxy.delay = 0.0
    again = record(resumed_step=50)
    again.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


def test_a_server_that_is_down_from_the_start_gets_everything_once_it_is_up(
    proxy, record, server, tmp_path
):
    metrics = record()
    assert take_steps(metrics, range(1, 51), pause=0.02) < BLOCKED
    proxy.open()
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 51)))


def test_a_server_that_dies_half_way_gets_each_point_once(proxy, record, server, tmp_path):
    proxy.open()
    metrics = record()
    take_steps(metrics, range(1, 101))
    until_delivered(tmp_path / "run", 100)
    # First it accepts data without responding, then it is down, then it is back.
    proxy.dumb, asked = True, proxy.requests
    assert take_steps(metrics, range(101, 201)) < BLOCKED
    eventually(lambda: proxy.requests > asked, "a request arrives", seconds=120)
    proxy.close()
    assert take_steps(metrics, range(201, 301), pause=0.01) < BLOCKED
    proxy.dumb = False
    proxy.open()
    assert take_steps(metrics, range(301, 401)) < BLOCKED
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 401)))


def test_a_killed_and_restarted_server_gets_each_point_once(
    mlflow, proxy, record, server, tmp_path
):
    proxy.open()
    metrics = record()
    take_steps(metrics, range(1, 101))
    until_delivered(tmp_path / "run", 100)
    mlflow.kill()
    asked = proxy.requests
    assert take_steps(metrics, range(101, 201), pause=0.01) < BLOCKED
    eventually(lambda: proxy.requests > asked, "a request arrives", seconds=120)
    mlflow.start()
    assert take_steps(metrics, range(201, 301)) < BLOCKED
    metrics.close("FINISHED")
    assert histories(server, tmp_path / "run") == ("FINISHED", complete(range(1, 301)))


def test_a_record_left_running_by_a_kill_is_corrected_on_resume(proxy, record, server, tmp_path):
    proxy.open()
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
