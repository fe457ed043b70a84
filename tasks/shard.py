"""The shard stage: tokenise and pack a corpus into a dataset folder, or reuse what stands."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext

from infini_model.config import Config
from tasks.stage import STAGE, run_stage


class ContentKey(CachePolicy):
    """Caches by the dataset's content key, across runs.

    Prefect's default policy holds the run's id and would never hit. A hit is not compared with the
    disk either, so the flow refreshes it unless the plan found the folder intact.
    """

    def compute_key(
        self,
        task_ctx: TaskRunContext,  # noqa: ARG002 - the signature is Prefect's
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> str:
        """The key under which the result is stored."""
        return f"dataset-{inputs['plan']['key']}"


@task(name="plan", **STAGE)
def plan_dataset(config: Config, corpus: dict[str, Any] | None) -> dict[str, Any]:
    """Tell which dataset is asked for, by its content key, and whether it stands intact.

    Trains the tokenizer where that is asked for and not done. Without a corpus it is the finished
    folder of `data.folder`, or the newest one. Every checksum of a folder that stands is compared.
    """
    arguments = [] if corpus is None else ["--corpus", corpus["corpus"]]
    return run_stage("plan", config, config.stages.shard, *arguments)


@task(name="shard", cache_policy=ContentKey(), **STAGE)
def build_dataset(
    config: Config,
    corpus: dict[str, Any],
    plan: dict[str, Any],  # noqa: ARG001 - it is what the result is cached by
) -> dict[str, Any]:
    """Make the partitions that are missing or damaged, and the dataset folder of all of them.

    Two runs that ask for the same key at once do the work once. Returns the folder and its key.
    """
    result = run_stage("shard", config, config.stages.shard, "--corpus", corpus["corpus"])
    create_table_artifact(result["splits"], key="dataset", description=result["folder"])
    return result
