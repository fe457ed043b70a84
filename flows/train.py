"""Training alone, on a finished dataset."""

from __future__ import annotations

from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.parameters import as_flow
from infini_model.config import Config
from tasks import train as stage
from tasks.checks import check_training_memory, refresh_and_check_stores
from tasks.shard import use_dataset
from tasks.weights import fetch_weights


@as_flow
def train(config: Config) -> State[dict[str, str]]:
    """Train on the dataset in `data.folder`, or the newest one. Returns the run folder."""
    refresh_and_check_stores(config, builds_dataset=False)
    check_training_memory(config)
    weights = fetch_weights(config)
    dataset = use_dataset(config)
    with stage.train(config, dataset, weights) as run_dir:
        return Completed(message=stage.outcome(run_dir), data={"run_dir": str(run_dir)})
