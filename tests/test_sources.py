"""What linters cannot tell of the sources; `make lint` holds the other rules (pyproject.toml)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Code of strangers that runs, and a server that listens on all of a machine's networks.
DANGERS = re.compile(r"trust_remote_code(?!=False\b)|(?<![\d.])0\.0\.0\.0(?![\d.])")
PRODUCT = ("infini_model", "tasks", "flows", "deployments")


def test_no_source_trusts_remote_code_or_listens_to_everyone() -> None:
    paths = [path for room in PRODUCT for path in (ROOT / room).rglob("*") if path.is_file()]
    sources = [path for path in paths if path.suffix != ".pyc"]
    assert len(sources) > 100
    assert [path for path in sources if DANGERS.search(path.read_text(encoding="utf-8"))] == []
