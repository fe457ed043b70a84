"""Commands run as users run them, their outputs, and their state in Prefect."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml
from shared import SMALL, WORDS

from flows import cli
from infini_model import __main__ as stages
from infini_model.runtime.processes import wait_until
from infini_model.runtime.stage_protocol import ERROR, RESULT

Environment = dict[str, str]
Done = subprocess.CompletedProcess[str]
# Seconds that a test waits for what must happen, however slow the machine: long enough that only a
# hang takes longer, and short enough for pytest's own timeout to leave it time to be named.
PATIENCE = 300.0
# The same for what goes through several stages, each in a process of its own: `make run` takes
# eleven minutes beside two other workers.
WHOLE = 6 * PATIENCE


def write_texts(folder: Path, count: int, words: int = 60, seed: int = 0) -> Path:
    """Write `count` text files with distinct documents; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    for number in range(count):
        text = f"{seed} {number}. " + " ".join(chance.choices(WORDS, k=words))
        (folder / f"{number:04d}.txt").write_text(text)
    return folder


# A line of a worker of a Ray cluster.
OF_RAY = re.compile(r"\(\w+ pid=\d+")


def tiny(texts: Path, output_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings that go from text to report in seconds; `sections` override them."""
    tree: dict[str, Any] = {
        "run": {"output_dir": str(output_dir)},
        "data": {
            "name": "tiny",
            "source": {"paths": [str(texts / "*.txt")]},
            "splits": {"train": 0.6, "validation": 0.2, "test": 0.2},
            "workers": 1,
        },
        "packing": {"context_length": 64},
        "model": dict(SMALL),
        "training": {"max_steps": 20, "batch_size": 2, "warmup_steps": 2},
        "launch": {"gpus": "cpu"},
        "logging": {"logging_steps": 1, "eval_steps": 5},
        "checkpoint": {"save_steps": 5},
        "evaluation": {"max_windows": 8, "sample": {"prompt_tokens": 16, "max_new_tokens": 8}},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return tree


def write_settings(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


class Running:
    """A background command with its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, env: Environment, **options: Any) -> None:
        self.log = log
        options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, env=env, **options)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until `text` has been printed; fail if the command ends without it."""

        def is_printed() -> bool:
            ended = self.process.poll()
            is_there = text in self.output
            assert is_there or ended is None, f"ended with {ended}:\n{self.output}"
            return is_there

        eventually(is_printed, lambda: f"{text!r} in\n{self.output}")

    def wait(self) -> int:
        """Wait for the command to end; returns the exit status."""
        try:
            return self.process.wait(WHOLE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {WHOLE} s:\n{self.output}") from None

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def end(self) -> None:
        if self.process.poll() is None:
            for process in self.tree():
                kill(process, signal.SIGKILL)
        self.process.wait()


def kill(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process, which may already have ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def is_gone(pid: int) -> bool:
    """Whether a process has ended, perhaps without having been waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def words_of(process: psutil.Process) -> list[str]:
    """The command line of a process; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def infini(*arguments: str | Path) -> list[str]:
    """The command line of `infini`, through its module."""
    program = "import sys; from flows.cli import main; sys.argv[0] = 'infini'; main()"
    return [sys.executable, "-c", program, *map(str, arguments)]


def run(command: Sequence[str], env: Environment, **options: Any) -> Done:
    """Run a command to completion, with separate stdout and stderr."""
    options |= {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, env=env, timeout=WHOLE, check=False, **options)


def succeed(command: Sequence[str], env: Environment, **options: Any) -> Done:
    """Run a command that must end with status 0 and show no traceback."""
    done = run(command, env, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Undo what a program changes in the process that it runs in."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    thresholds, logger = gc.get_threshold(), logging.getLogger("infini_model")
    level = logger.level
    try:
        yield
    finally:
        logger.setLevel(level)
        gc.set_threshold(*thresholds)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_here(
    main: Callable[[], object],
    *arguments: str | Path,
    env: Environment | None = None,
    stdin: bytes = b"",
) -> Done:
    """Run the `main` of a program in this process: most of a short command is its imports."""
    words, output, errors = ["program", *map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        _process_kept(),
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    return Done(words, int(str(status or 0)), output.getvalue(), errors.getvalue())


def infini_here(*arguments: str | Path, env: Environment, stdin: bytes = b"") -> Done:
    """Run `infini` in this process; for commands that end before they use Prefect."""
    return run_here(cli.main, *arguments, env=env, stdin=stdin)


def stage(
    name: str, settings: Path, *arguments: str | Path, env: Environment | None = None
) -> dict[str, Any]:
    """Run a stage without Prefect, with `env` in a process of its own.

    Returns its report, with `error` and `kind` if it failed.
    """
    words = [name, "--config", settings, *arguments]
    if env is None:
        done = run_here(stages.main, *words)
    else:
        done = run([sys.executable, "-m", "infini_model", *map(str, words)], env)
    # A task on Ray that is cancelled is interrupted wherever it is, and Ray passes its lines on.
    own = [line for line in (done.stdout + done.stderr).splitlines() if not OF_RAY.search(line)]
    assert "Traceback" not in "\n".join(own), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("::")]
    reported = dict(line.split(" ", 1) for line in lines)
    if done.returncode == 0:
        return dict(json.loads(reported[RESULT]))
    assert done.returncode == 2, done.stdout + done.stderr
    error = json.loads(reported[ERROR])
    assert "\n" not in error["message"]
    return {"error": error["message"], "kind": error["kind"]}


def dataset_of(settings: Path) -> Path:
    """Build the dataset of a configuration, without Prefect."""
    listing = stage("download", settings)["listing"]
    return Path(stage("shard", settings, "--listing", listing)["folder"])


def eventually(
    condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = PATIENCE
) -> None:
    """Wait until `condition` holds; fail, naming `what`, if it does not in time.

    `what` is a function where it describes a state: it is then called when time is up. A condition
    may be a query to a server that shares the cores, so it is checked five times a second.
    """
    if not wait_until(condition, every_seconds=0.2, timeout_seconds=seconds):
        named = what if isinstance(what, str) else what()
        raise AssertionError(f"not after {seconds} s: {named}")


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of `processes` that are still running, without zombies."""
    return [process for process in processes if process.is_running() and not is_gone(process.pid)]


def processes_about(folder: Path) -> list[str]:
    """Command lines of live processes that mention `folder` or use a database in it."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            home = process.environ().get("PREFECT_HOME", "")
            if any(str(folder) in text for text in (*words, home)):
                found.append(" ".join(words))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def leftovers(folder: Path) -> list[Path]:
    """Temporary names that a finished or failed command must not leave."""
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


def answers(url: str) -> bool:
    """Whether a server responds at an address."""
    try:
        urllib.request.urlopen(url, timeout=10.0).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def api(url: str, path: str, method: str = "POST", **body: Any) -> Any:
    """The response of Prefect's API; None where it has nothing to say."""
    data = None if method == "GET" else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{path}", data, headers, method=method)
    answers: list[bytes] = []

    def is_answered() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                answers.append(answer.read())
        except urllib.error.HTTPError as error:
            # The database was locked for seconds; Prefect's own client asks again, too.
            if error.code != 503:
                raise
        return bool(answers)

    eventually(is_answered, f"an answer to {method} {path}")
    return json.loads(answers[0]) if answers[0] else None


def flow_run(url: str, output: str) -> dict[str, Any]:
    """The flow run whose address a command printed."""
    number = output.partition("/runs/flow-run/")[2][:36]
    return dict(api(url, f"flow_runs/{number}", "GET"))
