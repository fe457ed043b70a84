"""docs/first-model.md and its notebook: all of it runs in an empty folder and prints what is shown.

A `console` block holds commands, after `$ `, and what they print: `…` stands for any part of a
line and, alone, for any lines; numbers and keys are those of the reader's own run. A command that
prints an `error:` at last ends with status 2; at `^C` it is interrupted, while its training halts
at the step shown. `sh` blocks show nothing.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from commands import PATIENCE, Environment, Running, eventually
from nbclient import NotebookClient
from stopping import Halt

pytestmark = pytest.mark.story
PAGE = Path(__file__).resolve().parents[1] / "docs" / "first-model.md"
NOTEBOOK = PAGE.with_name("notebook.ipynb")
BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*\n(?:> .*\n)*)", re.MULTILINE)
# What a reader trains for minutes is trained for some steps. The run `plain` takes over those of
# the first one, from its config.yaml, and the time for which it may halt.
SHORTER = {
    "paths='texts/*.txt'\n": "paths='texts/*.txt' training.max_steps=30 "
    f"launch.hang_timeout_seconds={PATIENCE}\n",
    "training.max_steps=100": "training.max_steps=3 training.warmup_steps=1",
}
INTERRUPT, INTERRUPTED_AT = "^C\n", 10


class Step(NamedTuple):
    """A command, and what the page shows of its output; None where it shows none."""

    command: str
    shown: str | None


def steps() -> Iterator[Step]:
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "sh":
            yield Step(text, None)
            continue
        _, *parts = COMMAND.split(text)
        for command, shown in zip(parts[::2], parts[1::2], strict=True):
            yield Step(command.replace("\n> ", "\n"), shown)


def masked(text: str) -> str:
    """Without numbers and keys, which differ from run to run, and the widths of columns."""
    text = re.sub(r"\b[0-9a-f]{6,}\b", "#", text)
    text = re.sub(r"-?\d+(?:[.,:/-]\d+)*(?:e[+-]\d+)?", "#", text)
    return re.sub(r" {3,}", "  ", text)


def pattern(shown: str) -> str:
    """A regular expression for what the page shows."""
    lines = [
        "(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + "\n"
        for line in masked(shown).splitlines()
    ]
    return "".join(lines)


def shortened(command: str) -> str:
    for words, replacement in SHORTER.items():
        command = command.replace(words, replacement)
    return command


class Terminal:
    """Where a stranger types what the page says."""

    def __init__(self, folder: Path, env: Environment) -> None:
        self.folder = folder
        self.env = env
        self.halt = Halt(folder.parent / "halt", INTERRUPTED_AT)

    def type(self, step: Step) -> None:
        """Type a command, and compare what it prints and its status with what is shown."""
        before, interrupt, _ = (step.shown or "").partition(INTERRUPT)
        command = ["bash", "-ec", shortened(step.command)]
        env = self.env | (self.halt.environment if interrupt else {})
        options = {"cwd": self.folder, "start_new_session": True}
        typed = Running(command, self.folder.parent / "terminal.log", env, **options)
        try:
            if interrupt:
                self._interrupt(before, typed)
            status = typed.wait()
        finally:
            typed.end()
        fails = re.search(r"^error: .*\n\Z", step.shown or "", re.MULTILINE)
        expected = 130 if interrupt else 2 if fails else 0
        assert status == expected, f"{step.command}{typed.output}"
        assert "Traceback" not in typed.output, typed.output
        if step.shown is not None:
            shown = step.shown.replace(INTERRUPT, "")
            matches = re.fullmatch(pattern(shown), masked(typed.output))
            assert matches, f"{step.command}{typed.output}"

    def _interrupt(self, shown: str, typed: Running) -> None:
        def is_printed() -> bool:
            assert typed.process.poll() is None, typed.output
            return re.match(pattern(shown), masked(typed.output)) is not None

        eventually(is_printed, lambda: f"{shown}in\n{typed.output}")
        self.halt.wait()
        os.killpg(typed.process.pid, signal.SIGINT)
        self.halt.resume_told()


@pytest.fixture
def terminal(tmp_path: Path, session_environment: Environment) -> Terminal:
    """An empty folder, and the `infini` of this installation on the path."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    env = {
        **session_environment,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{session_environment['PATH']}",
    }
    return Terminal(folder, env)


def test_every_command_of_the_page_does_what_it_says(terminal: Terminal) -> None:
    typed = list(steps())
    assert len(typed) > 15
    for step in typed:
        terminal.type(step)


def test_the_notebook_shows_what_it_does(terminal: Terminal) -> None:
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    (training,) = (cell for cell in notebook.cells if "!infini run" in cell.source)
    assert "training.max_steps=300" in training.source
    training.source = training.source.replace("max_steps=300", "max_steps=20")
    client = NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3")
    client.execute(env=terminal.env | {"TMPDIR": str(terminal.folder)})
    for cell, shown in zip(notebook.cells, committed.cells, strict=True):
        kinds = [
            {output.output_type for output in each.get("outputs", ())} for each in (cell, shown)
        ]
        assert kinds[0] == kinds[1], cell.source
    assert "Report: " in "".join(output.text for output in training.outputs)


@pytest.mark.parametrize(
    ("shown", "printed", "matches"),
    [
        ("step 4: 0.5 of texts-d7feb0\n", "step 12: -1.5e-04 of texts-40d44e\n", True),
        ("a         1,000\n", "a  40\n", True),
        ("a … c\n", "a b c\n", True),
        ("a … c\n", "a b\nc\n", False),
        ("a\n…\nc\n", "a\nb\nb\nc\n", True),
        ("a\nc\n", "a\nb\nc\n", False),
        ("error: no such run\n", "error: no such runs\n", False),
    ],
)
def test_what_is_shown_is_compared(shown: str, printed: str, *, matches: bool) -> None:
    assert bool(re.fullmatch(pattern(shown), masked(printed))) is matches
