"""A training from the form to its report, watched while it runs."""

import pytest
from commands import Environment
from playwright.sync_api import expect
from serving import Serving
from stopping import Halt
from ui import Prefect

from infini_model.runtime.runs import find_run

pytestmark = pytest.mark.story


@pytest.fixture(scope="module")
def halt(tmp_path_factory: pytest.TempPathFactory) -> Halt:
    """Keeps the training at step 60 while it is looked at."""
    return Halt(tmp_path_factory.mktemp("halt") / "site", 60)


@pytest.fixture(scope="module")
def variables(halt: Halt) -> Environment:
    """What `infini serve` is started with."""
    return halt.environment


def test_one_changed_field_gives_a_training_with_live_progress_and_a_report(
    prefect: Prefect, serving: Serving, halt: Halt
) -> None:
    prefect.open_form("pipeline")
    prefect.field("Steps").fill("80")
    flow_run = prefect.submit()

    prefect.expect_log("Step [60/80]")
    prefect.expect_state("Running")
    prefect.keep("run-live")
    halt.wait()
    halt.resume()
    prefect.expect_state("Completed")
    prefect.keep("run-completed")
    assert serving.state(flow_run)["name"] == "Completed"
    prefect.page.reload()
    # After a reload the chart spans the whole run.
    expect(prefect.page.locator("main canvas")).to_be_visible()
    prefect.expect_in_tab("Artifacts", prefect.tab("Artifacts").get_by_text("report").first)
    prefect.keep("run-artifacts")
    prefect.open_artifact("report")
    expect(prefect.page.get_by_role("heading", name="Scores").first).to_be_visible()
    prefect.keep("report")
    run_dir = find_run(serving.output / "runs", flow_run)
    assert run_dir is not None
    assert "trained for 80 steps" in (run_dir / "report.md").read_text()
