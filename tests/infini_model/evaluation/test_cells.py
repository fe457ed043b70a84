"""Finished cells outlive a kill, and are not measured again."""

import os
import signal
import subprocess
import sys

import pytest

from infini_model.evaluation.cells import Cells

KILLED = """
import os, signal, sys
from pathlib import Path
from infini_model.evaluation.cells import Cells

def measure(name):
    if name == "third":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"cell": name}

cells = Cells(Path(sys.argv[1]))
for name in ("first", "second", "third", "fourth"):
    cells.measured(name, lambda: measure(name))
"""


def measure_all(cells):
    measured = []
    for name in ("first", "second", "third", "fourth"):
        found = cells.measured(name, lambda name=name: measured.append(name) or {"cell": name})
        assert found == {"cell": name}
    return measured


def test_a_kill_keeps_the_finished_cells(tmp_path):
    folder = tmp_path / "evaluation" / "task-key"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", KILLED, folder], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert measure_all(Cells(folder)) == ["third", "fourth"]
    assert measure_all(Cells(folder)) == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.json" for name in ("first", "second", "third", "fourth")
    )


def test_a_failed_cell_is_measured_again(tmp_path):
    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Cells(tmp_path).measured("cell", fail)
    assert Cells(tmp_path).measured("cell", lambda: 1) == 1


def test_a_result_is_the_same_fresh_and_kept(tmp_path):
    result = {"pairs": [(1, 0.1), (2, None)], "tiny": {3: 1e-300}}
    fresh = Cells(tmp_path).measured("cell", lambda: result)
    assert fresh == Cells(tmp_path).measured("cell", lambda: None)
    assert fresh == {"pairs": [[1, 0.1], [2, None]], "tiny": {"3": 1e-300}}
