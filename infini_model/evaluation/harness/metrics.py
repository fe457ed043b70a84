"""Metrics that the harness has computed, with intervals of 95%."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from infini_model.evaluation.statistics import QUANTILE, bootstrap, wilson


class Measured(BaseModel):
    """A metric of a harness task, or of a group of them.

    Attributes:
        task: Name of the task.
        metric: Name of the metric, with that of its filter if there are several.
        value: Its value.
        interval: Its interval of 95%; None where nothing is known of its error.
        documents: Number of documents that it is of.
        shots: Examples in front of each question.
    """

    model_config = ConfigDict(frozen=True)

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    documents: int
    shots: int


def read_metrics(results: dict[str, Any], tasks: dict[str, Any]) -> list[Measured]:
    """The finite metrics in `results`, which `lm_eval.evaluate` returned for `tasks`, by name."""
    return [
        measured
        for name, metrics in results["results"].items()
        for measured in _of_task(name, metrics, results, tasks.get(name))
    ]


def _of_task(
    name: str, metrics: dict[str, Any], results: dict[str, Any], task: Any
) -> Iterator[Measured]:
    """The metrics of a task, or of a group, which has no `task`."""
    for key, value in metrics.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not _is_finite(value):
            continue
        samples = results["samples"].get(name, [])
        scores = [each[metric] for each in samples if each["filter"] == chosen and metric in each]
        aggregate = task.aggregation().get(metric) if task else None
        yield Measured(
            task=name,
            metric=metric if chosen == "none" else f"{metric}_{chosen}",
            value=value,
            interval=_interval(value, metrics.get(f"{metric}_stderr,{chosen}"), scores, aggregate),
            documents=metrics["sample_len"],
            shots=results["n-shot"].get(name, 0),
        )


def _interval(
    value: float, error: Any, scores: list[Any], aggregate: Any
) -> tuple[float, float] | None:
    """The interval of a metric with the harness's standard error and the scores of documents."""
    if scores and all(each in (0, 1) for each in scores):
        share = wilson(int(sum(scores)), len(scores))
        if math.isclose(share.estimate, value):
            return share.low, share.high
    if _is_finite(error):
        return value - QUANTILE * error, value + QUANTILE * error
    if len(scores) < 2 or not all(isinstance(each, tuple) for each in scores):
        return None
    # A perplexity: log-likelihoods and numbers of words or bytes, of which the metric is a function
    # of the ratio alone.
    sums, counts = ([[float(each[part])] for each in scores] for part in (0, 1))
    (ratio,) = bootstrap(sums, counts)
    low, high = sorted(float(aggregate([(end, 1.0)])) for end in ratio[1:])
    return low, high


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
