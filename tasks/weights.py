"""The weights stage: fetch and check the pretrained weights that a run begins from."""

from __future__ import annotations

from typing import Any

from prefect import task

from infini_model.config import Config
from tasks.failures import failure_as_state
from tasks.stage import STAGE, run_stage


@task(name="weights", task_run_name="weights {config.model.initial_weights}", **STAGE)
@failure_as_state
def fetch_weights(config: Config) -> dict[str, Any]:
    """Fetch `model.initial_weights` if they are on the hub, and check them and their tokenizer.

    Returns an `InitialWeights` as JSON.
    """
    return run_stage("weights", config, config.stages.weights)
