"""`infini run`, from documents to a report, and its outputs."""

from collections import Counter
from pathlib import Path

import datasets
import pytest
from commands import eventually, processes_about
from trials import STEPS, Undisturbed

from infini_model.data.manifest import SPLITS
from infini_model.runtime.metrics_file import read_metrics

pytestmark = pytest.mark.story


def test_a_run_from_scratch_ends_with_a_report_and_leaves_no_process(
    undisturbed: Undisturbed,
) -> None:
    report = undisturbed.run_dir / "report.md"
    assert undisturbed.printed.startswith("Starting a Prefect server for this command")
    assert f"Report: {report}" in undisturbed.printed
    assert report.is_file()
    assert (undisturbed.output / "runs" / "latest").resolve() == undisturbed.run_dir
    assert [line["step"] for line in read_metrics(undisturbed.run_dir) if "train/loss" in line] == [
        *range(1, STEPS + 1)
    ]
    losses = [
        line["validation/loss"]
        for line in read_metrics(undisturbed.run_dir)
        if "validation/loss" in line
    ]
    assert losses[-1] < losses[0] - 1.0
    eventually(lambda: not processes_about(undisturbed.output), "the end of all processes")


def test_the_dataset_opens_with_datasets_and_holds_each_document_once(
    undisturbed: Undisturbed, documents: Path
) -> None:
    found: Counter[str] = Counter()
    opened = datasets.load_from_disk(str(undisturbed.output / "datasets" / "latest"))
    assert list(opened) == list(SPLITS)
    for split in opened.values():
        assert len(split) > 0
        for ids in split["input_ids"]:
            assert ids[-1] == 255
            found[bytes(ids[:-1]).decode()] += 1
    assert found == Counter(path.read_text() for path in documents.iterdir())
