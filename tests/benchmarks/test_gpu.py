"""`make gpu` goes on after a part that fails, and its table says which one it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import eventually, is_gone

from benchmarks import gpu

SUMMARY = {
    "benchmark": "speed",
    "ratios": {
        name: {"median": 2.0, "lowest": 1.0, "highest": 3.0}
        for name in ("slow", "fast", "small", "large", "free")
    },
    "targets": {"slow": 2.1, "fast": 1.9},
    "limits": {"small": 2.0, "large": 1.9},
}

PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def program(name: str, code: str) -> gpu.Part:
    return gpu.Part(name, (sys.executable, "-c", textwrap.dedent(code)))


def file_of_tests(folder: Path, name: str, code: str) -> gpu.Part:
    path = folder / name
    path.write_text(f'"""What {name} tests.\n\nAnd more."""\n{textwrap.dedent(code)}')
    pytest = (sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", str(path))
    return gpu.Part(str(path), pytest, tests=True)


def measured(page: Path) -> dict[str, str]:
    """The last column of the page's table by the first one."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {first: last for first, _, last in cells[2:]}


def test_a_failing_part_is_a_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "PART_SECONDS", 20.0)
    page = tmp_path / "page.md"
    parts = [
        program("broken", "raise SystemExit('no such kernel')"),
        program("killed", "import os; os.kill(os.getpid(), 9)"),
        program("silent", "print('no line of JSON')"),
        file_of_tests(
            tmp_path,
            "test_mixed.py",
            """
            import pytest
            def test_good(): pass
            @pytest.mark.parametrize("size", [1])
            def test_bad(size): assert False
            @pytest.fixture
            def lost(): raise OSError
            def test_lost(lost): pass
            """,
        ),
        file_of_tests(tmp_path, "test_crash.py", "import os; os.abort()"),
        file_of_tests(
            tmp_path, "test_none.py", "import pytest; pytest.skip(allow_module_level=True)"
        ),
        file_of_tests(tmp_path, "test_fine.py", "def test_fine(): pass"),
        program("last", f"print('a table')\nprint({json.dumps(SUMMARY)!r})"),
    ]
    assert gpu.run_all(parts, PLAIN, "One GPU", page, tmp_path / "logs") == 1
    assert measured(page) == {
        "`broken` runs": "**failed**: exit status 1",
        "`killed` runs": "**failed**: exit status -9",
        "`silent` runs": "**failed**: exit status 0",
        "`test_mixed.py`: What test_mixed.py tests.": (
            "**failed**: 1 failed, 1 passed, 1 error, exit status 1; `test_bad[1]`; `test_lost`"
        ),
        "`test_crash.py`: What test_crash.py tests.": "**failed**: exit status -6",
        "`test_none.py`: What test_none.py tests.": "**failed**: 1 skipped, exit status 5",
        "`test_fine.py`: What test_fine.py tests.": "1 passed",
        "`speed`: slow": "2.00 (1.00 to 3.00): **missed**",
        "`speed`: fast": "2.00 (1.00 to 3.00): met",
        "`speed`: small": "2.00 (1.00 to 3.00): met",
        "`speed`: large": "2.00 (1.00 to 3.00): **missed**",
        "`speed`: free": "2.00 (1.00 to 3.00)",
    }
    assert "One GPU; " in page.read_text()
    assert page.read_text().startswith(gpu.PAGE.read_text().partition(gpu.RESULTS)[0])
    printed = capsys.readouterr().out
    assert "no such kernel" in printed
    assert "12 rows, 6 failed\n" in printed
    assert gpu.run_all(parts[-1:], {}, "One GPU", page, tmp_path / "logs") == 0


def test_a_part_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(child.pid, flush=True)
        child.wait()
    """
    (row,) = gpu.run(program("endless", code), {}, 3.0, tmp_path)
    assert (row.measured, row.failed) == ("stopped after 3 s", True)
    eventually(lambda: is_gone(int((tmp_path / "endless.log").read_text())), "the child's end")
    (row,) = gpu.run(program("late", "print('{}')"), {}, -0.5, tmp_path)
    assert (row.measured, row.failed) == ("not run: the 1200 s were over", True)


@pytest.mark.story
def test_every_file_with_tests_for_a_gpu_is_a_part() -> None:
    """None is left out for being recognised by its text; `(cuda)` reads all files."""
    command = [sys.executable, "-m", "pytest", "-m", "(cuda)", "--collect-only", "tests"]
    listed = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=True)
    files = set(re.findall(r"^(\S+\.py)::", listed.stdout, re.MULTILINE))
    assert len(files) > 5
    assert {part.name for part in gpu.test_parts(gpu.REHEARSAL)} == files


@pytest.mark.slow
@pytest.mark.story
@pytest.mark.timeout(1200)
def test_the_rehearsal_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--output", str(page)])
    before = gpu.PAGE.read_text()
    assert gpu.main() == 0
    assert gpu.PAGE.read_text() == before
    found = measured(page)
    for each in gpu.BENCHMARKS:
        assert any(claim.startswith(f"`{each.name}`: ") for claim in found)
    assert sum(text.endswith("passed") for text in found.values()) >= 5
