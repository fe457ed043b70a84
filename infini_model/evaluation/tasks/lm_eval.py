"""Tasks of EleutherAI's lm-evaluation-harness, local ones or its own, measured on our model.

The harness scores; it asks for log-likelihoods of texts and for continuations (`HarnessModel`). Its
standard errors become intervals of 95%.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

from infini_model.config.evaluation import LmEvalConfig
from infini_model.data.sources.files import hub_errors
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.context import EvalContext, kept_or_computed
from infini_model.evaluation.pages import table
from infini_model.evaluation.statistics import QUANTILE, bootstrap, wilson
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import content_key

try:
    import lm_eval
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError(
        "evaluation.tasks: lm_eval needs a package: pip install lm-eval -c requirements.lock"
    ) from error

KEY = "evaluation.lm_eval"
# Resamples of metrics whose error has no formula; the harness takes 100,000, which takes minutes.
RESAMPLES = 1000


class Measured(NamedTuple):
    """A metric of a harness task, or of a group of them; `shots` examples precede each question.

    Its name has that of its filter if there are several; `interval` is of 95%, None where nothing
    is known of its error.
    """

    task: str
    metric: str
    value: float
    interval: tuple[float, float] | None
    documents: int
    shots: int

    @property
    def span(self) -> str:
        """The interval as text."""
        return "–" if self.interval is None else "{:.4f} to {:.4f}".format(*self.interval)


class LmEval(EvaluationTask):
    """Runs the tasks that `evaluation.lm_eval` names; each that has finished is kept."""

    title = "lm-evaluation-harness"

    def __init__(self) -> None:
        # What the harness has loaded for each name: a task, or those of a group.
        self._loaded: dict[str, dict[str, Any]] = {}

    def check(self, context: EvalContext) -> None:
        """Load the documents of all tasks; refuse a wrong name, and a model of diffusion."""
        objective = context.config.training.objective
        if objective != "causal":
            raise UserError(
                f"evaluation.tasks: lm_eval needs a model of training.objective=causal, this one "
                f"is of {objective}"
            )
        self._loaded = self._loaded or load_tasks(context.config.evaluation.lm_eval)

    def sequences(self, context: EvalContext) -> int:
        """The documents of all tasks."""
        self.check(context)
        limit = context.config.evaluation.lm_eval.limit
        return sum(_documents(loaded, limit) for loaded in self._loaded.values())

    def run(self, context: EvalContext) -> TaskResult:
        """Run one task of the harness after another."""
        self.check(context)
        measured, summary = list[Measured](), []
        for name, loaded in self._loaded.items():
            found = _measure(loaded, name, context)
            measured += found
            # The metric of a group as a whole, if it has one.
            for first in [each for each in found if each.task == name][:1] or found[:1]:
                interval = f" ({first.span})" if first.interval else ""
                summary.append(
                    f"`{first.task}` of the lm-evaluation-harness: {first.metric} is "
                    f"**{first.value:.4f}**{interval} over {first.documents:,} documents."
                )
        named = {f"evaluation/{each.task}_{each.metric}": each for each in measured}
        header = ("Task", "Metric", "Value", "Interval of 95%", "Examples", "Documents")
        rows = [
            (x.task, x.metric, f"{x.value:.4f}", x.span, str(x.shots), f"{x.documents:,}")
            for x in measured
        ]
        return TaskResult(
            metrics={name: each.value for name, each in named.items()},
            intervals={name: each.interval for name, each in named.items() if each.interval},
            section=table(header, rows),
            summary=summary,
            details={"measured": [each._asdict() for each in measured]},
        )


def load_tasks(settings: LmEvalConfig) -> dict[str, dict[str, Any]]:
    """What the harness loads for each name in `settings.tasks`.

    Raises:
        UserError: No task is named, or one is unknown or runs code that a model writes.
        DataError: The documents of a task cannot be read.
        UnreachableError: They are on the hub, which does not answer.
    """
    if not settings.tasks:
        raise UserError(f"{KEY}.tasks: names no task of the harness; set it to those to run")
    folder = settings.include_path and settings.include_path.resolve()
    if folder is not None and not folder.is_dir():
        raise UserError(f"{KEY}.include_path: {folder} is not a folder")
    with _quiet():
        # Listing the harness's own 15,000 tasks takes a while.
        manager = TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
        if folder is not None and not set(settings.tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder and str(folder))
        return {name: _load(name, manager, settings.num_fewshot) for name in settings.tasks}


def _load(name: str, manager: Any, num_fewshot: int | None) -> dict[str, Any]:
    if name not in manager.all_tasks:
        raise UserError(f"{KEY}.tasks: the harness has no task {name!r}")
    # A key that the harness does not know is a TypeError.
    with _one_line(name, TypeError), hub_errors(f"{KEY}.tasks: {name}"):
        loaded: dict[str, Any] = manager.load([name])
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"{KEY}.tasks: {name} runs code or shows pictures: not supported")
        shots = task.get_config("num_fewshot")
        # As in the harness, a task that sets 0 keeps it.
        if shots is None or (shots and num_fewshot is not None):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return loaded


def _documents(loaded: dict[str, Any], limit: int | None) -> int:
    """Number of documents to score."""
    sizes = [len(task.eval_docs) for task in loaded["tasks"].values()]
    return sum(min(size, limit or size) for size in sizes)


def _measure(loaded: dict[str, Any], name: str, context: EvalContext) -> list[Measured]:
    """The metrics of what one name stands for, kept or measured."""
    limit, seed = context.config.evaluation.lm_eval.limit, context.config.run.seed
    tasks, reported = loaded["tasks"], 0

    def report(share: float) -> None:
        nonlocal reported
        # A task with requests of two kinds goes through its documents twice.
        done = max(reported, int(share * _documents(loaded, limit)))
        context.on_windows(done - reported)
        reported = done

    def measure() -> list[dict[str, Any]]:
        from infini_model.evaluation.harness import HarnessModel

        model = HarnessModel(
            context.model,
            load_dataset_tokenizer(context.dataset_dir),
            batch_size=context.config.evaluation.batch_size,
            seed=seed,
            on_share=report,
        )
        # It would fork, which PyTorch's threads do not survive.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        random.seed(seed)
        for task in tasks.values():
            task.set_fewshot_seed(seed=seed)
        with _quiet(), _one_line(name):
            results = lm_eval.evaluate(
                model, loaded, limit=limit, bootstrap_iters=RESAMPLES, confirm_run_unsafe_code=False
            )
        return [each._asdict() for each in _read(results, tasks)]

    # The configurations and documents as they are after the tasks' own processing.
    contents = []
    for task_name, task in tasks.items():
        contents.append([task_name, str(task.dump_config()), _hash(task.eval_docs)])
        if task.get_config("num_fewshot"):
            contents[-1].append(_hash(task.fewshot_docs()))
    identity = {"content": content_key(contents), "limit": limit, "harness": version("lm_eval")}
    kept = kept_or_computed(context.kept_folder("lm_eval", identity), "measured", measure)
    report(1.0)
    return [Measured(**each) for each in kept]


def _hash(documents: Iterable[Any]) -> str:
    return content_key([json.dumps(each, default=str) for each in documents])


def _read(results: dict[str, Any], tasks: dict[str, Any]) -> Iterator[Measured]:
    """The finite metrics in what `lm_eval.evaluate` returned for `tasks`, by name."""
    for name, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_finite(value):
                continue
            scores = [
                each[metric]
                for each in results["samples"].get(name, [])
                if each["filter"] == chosen and metric in each
            ]
            error = metrics.get(f"{metric}_stderr,{chosen}")
            # A group is not among the tasks.
            aggregate = tasks[name].aggregation().get(metric) if name in tasks else None
            yield Measured(
                task=name,
                metric=metric if chosen == "none" else f"{metric}_{chosen}",
                value=value,
                interval=_interval(value, error, scores, aggregate),
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


@contextlib.contextmanager
def _one_line(name: str, *mistakes: type[Exception]) -> Iterator[None]:
    """Raise `UserError` for mistakes in the file of a task, a template that does not fit first."""
    try:
        yield
    except (TemplateError, *mistakes) as error:  # type: ignore[misc]  # jinja2 is not typed
        raise UserError(f"{KEY}.tasks: {name}: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own bars and messages; what is wrong raises."""
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        yield
