"""`make gpu` rehearsed on the CPU."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from benchmarks import gpu


def measured(page: Path) -> dict[str, str]:
    """The last column of the page's table by the first one."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {first: last for first, _, last in cells[2:]}


@pytest.mark.slow
@pytest.mark.story
@pytest.mark.timeout(3600)  # some twenty programs
def test_the_rehearsal_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--output", str(page)])
    # A lent GPU is given back; this machine may be slow.
    monkeypatch.setattr(gpu, "PART_SECONDS", math.inf)
    monkeypatch.setattr(gpu, "TOTAL_SECONDS", math.inf)
    before = gpu.PAGE.read_text()
    assert gpu.main() == 0
    assert gpu.PAGE.read_text() == before
    found = measured(page)
    for each in gpu.BENCHMARKS:
        assert any(claim.startswith(f"`{each.name}`: ") for claim in found)
    assert sum(text.endswith("passed") for text in found.values()) >= 5
