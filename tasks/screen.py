"""The screening stage: leave out texts of low quality, and near-duplicates."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import TableArtifact

from infini_model.config import Config
from tasks import artifacts
from tasks.stage import run_stage, run_with_retries


def screen(config: Config, listing: Path) -> Path:
    """Screen the sources that have `screen`, and return the file with the listing of what is left.

    Without any, that is `listing`.
    """
    if not any(each.screen for each in config.data.named_sources.values()):
        return listing
    return run_with_retries(_screen, config.stages, "screen", config.data.name, config, listing)


def _screen(config: Config, listing: Path) -> Path:
    config = config.updated(data={"folder": None})
    done = run_stage("screen", config, "--listing", str(listing))
    rows = []
    for name, found in done["sources"].items():
        counts, total = {"kept": found["kept"], **found["dropped"]}, found["documents"]
        outcomes = "; ".join(f"{outcome}: {count:,}" for outcome, count in counts.items())
        prefix = f"{name}: " if name else ""
        get_run_logger().info("%sscreened %s documents: %s", prefix, f"{total:,}", outcomes)
        rows += [
            {"source": name, "outcome": key, "documents": each, "share": f"{each / total:.1%}"}
            for key, each in counts.items()
        ]
    description = "Documents that screening keeps, and those that it drops by reason"
    artifacts.show("screened", TableArtifact(table=rows, description=description))
    return Path(done["listing"])
