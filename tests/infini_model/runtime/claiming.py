"""Helpers that claim run folders for a small configuration."""

from pathlib import Path

from commands import PATIENCE

from infini_model.config import Config, load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.holders import Owner
from infini_model.runtime.runs import record_evaluation


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(overrides=["run.preset=debug", f"run.output_dir={folder}", *overrides])


UI, NIGHT = Owner("ui", "http://localhost/flow-run/ui"), Owner("night")


def claim(
    config: Config,
    key: str = "k1",
    *,
    finish: bool = False,
    owner: Owner | None = None,
    adopt: bool = True,
    release_seconds: float = PATIENCE,
) -> Path:
    with claim_run(
        config,
        key,
        Path("data"),
        owner=owner,
        adopt=adopt,
        release_seconds=release_seconds,
    ) as run_dir:
        if finish:
            record_evaluation(run_dir, config.training.max_steps, key, {})
        return run_dir
