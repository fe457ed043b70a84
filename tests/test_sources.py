"""What linters cannot tell of the sources; `make lint` holds the other rules (pyproject.toml)."""

import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Code of strangers that runs, and a server that listens on all of a machine's networks.
DANGERS = re.compile(r"trust_remote_code(?!=False\b)|(?<![\d.])0\.0\.0\.0(?![\d.])")
PRODUCT = ("infini_model", "tasks", "flows", "deployments")
# What it tells the readers of a model card to do is not done here.
CARD = ROOT / "infini_model" / "evaluation" / "model_card.md"


def test_no_source_trusts_remote_code_or_listens_to_everyone() -> None:
    paths = [path for room in PRODUCT for path in (ROOT / room).rglob("*") if path.is_file()]
    sources = [path for path in paths if path.suffix != ".pyc" and path != CARD]
    assert len(sources) > 100
    assert [path for path in sources if DANGERS.search(path.read_text(encoding="utf-8"))] == []


def test_no_flow_hides_a_package() -> None:
    # Prefect puts the folder of a flow in front of all others from which its engine imports.
    names = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    assert "pipeline" in names
    hidden = names & (packages_distributions().keys() | sys.stdlib_module_names)
    # Only lm-eval needs Hugging Face's `evaluate`, in the process of a stage.
    assert hidden <= {"evaluate"}
