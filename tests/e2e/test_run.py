"""`infini run`, from documents to a report."""

import pytest
from commands import eventually, processes_about
from curves import curve
from trials import STEPS, Undisturbed

pytestmark = pytest.mark.story


def test_a_run_from_scratch_ends_with_a_report_and_leaves_no_process(
    undisturbed: Undisturbed,
) -> None:
    report = undisturbed.run_dir / "report.md"
    assert undisturbed.printed.startswith("Starting a Prefect server for this command")
    assert f"Report: {report}" in undisturbed.printed
    assert report.is_file()
    assert (undisturbed.output / "runs" / "latest").resolve() == undisturbed.run_dir
    assert [*curve(undisturbed.run_dir, "train/loss")] == [*range(1, STEPS + 1)]
    validation = [*curve(undisturbed.run_dir, "validation/loss").values()]
    assert validation[-1] < validation[0] - 1.0
    eventually(lambda: not processes_about(undisturbed.output), "the end of all processes")
