"""Tasks of the harness: found by name, identified by content, run, their metrics with intervals."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import os
import random
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel, ConfigDict

from infini_model.config.evaluation import LmEvalConfig
from infini_model.data.sources.files import hub_errors
from infini_model.evaluation.harness.metrics import Measured, read_metrics
from infini_model.runtime.errors import UnreachableError, UserError
from infini_model.runtime.storage import content_key

KEY = "evaluation.lm_eval"
INSTALL = "pip install lm-eval -c requirements.lock"
# Resamples of metrics whose error has no formula; the harness takes 100,000, which takes minutes.
RESAMPLES = 1000


class Identity(BaseModel):
    """What decides the results of a harness task, besides the model."""

    model_config = ConfigDict(frozen=True)

    content: str
    limit: int | None
    harness: str


class Suite:
    """The harness tasks that one name stands for: a task, or those of a group."""

    def __init__(self, name: str, loaded: dict[str, Any], settings: LmEvalConfig) -> None:
        self.name, self._loaded, self._settings = name, loaded, settings

    @property
    def documents(self) -> int:
        """Number of documents to score."""
        return sum(
            min(len(task.eval_docs), self._settings.limit or len(task.eval_docs))
            for task in self._loaded["tasks"].values()
        )

    def identity(self) -> Identity:
        """Of the configurations and documents, as they are after the tasks' own processing."""
        contents = [
            [name, str(task.dump_config()), *_documents(task)]
            for name, task in self._loaded["tasks"].items()
        ]
        return Identity(
            content=content_key(contents),
            limit=self._settings.limit,
            harness=version("lm_eval"),
        )

    def run(self, model: Any, seed: int) -> list[Measured]:
        """Measure a `lm_eval.api.model.LM`; `seed` draws the examples in front of questions.

        Raises `UserError` if a template of the task does not fit its documents.
        """
        from jinja2 import TemplateError
        from lm_eval import evaluate

        # It would fork, which PyTorch's threads do not survive.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        random.seed(seed)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed)
        with _quiet(), _one_line(self.name, TemplateError):
            results = evaluate(
                model,
                self._loaded,
                limit=self._settings.limit,
                bootstrap_iters=RESAMPLES,
                confirm_run_unsafe_code=False,
            )
        return read_metrics(results, self._loaded["tasks"])


def load_suites(settings: LmEvalConfig) -> list[Suite]:
    """Load the tasks that are named.

    Raises:
        UserError: The harness is not installed, no task is named, one is unknown or runs code that
            a model writes, or its documents are on the hub, which does not answer.
        DataError: The documents of a task cannot be read.
    """
    if not settings.tasks:
        raise UserError(f"{KEY}.tasks: names no task of the harness; set it to those to run")
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise UserError(f"evaluation.tasks: lm_eval needs a package: {INSTALL}") from error
    with _quiet():
        manager = _manager(settings)
        return [_load(name, manager, settings) for name in settings.tasks]


def _manager(settings: LmEvalConfig) -> Any:
    """The `TaskManager` that knows the tasks; listing the harness's own 15,000 takes a while."""
    from lm_eval.tasks import TaskManager

    folder = settings.include_path
    if folder is None:
        return TaskManager()
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"{KEY}.include_path: {folder} is not a folder")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    if set(settings.tasks) <= set(manager.all_tasks):
        return manager
    return TaskManager(include_path=str(folder))


def _load(name: str, manager: Any, settings: LmEvalConfig) -> Suite:
    from jinja2 import TemplateError

    if name not in manager.all_tasks:
        near = difflib.get_close_matches(name, manager.all_tasks, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{KEY}.tasks: the harness has no task {name!r}{hint}")
    try:
        # A key that the harness does not know is a TypeError.
        with _one_line(name, TemplateError, TypeError), hub_errors(f"{KEY}.tasks: {name}"):
            loaded = manager.load([name])
    except UnreachableError as error:  # after retries of its own, which take half a minute
        raise UserError(f"{error}; a task made from local files needs no network") from error
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"{KEY}.tasks: {name} runs code or shows pictures: not supported")
        shots = task.get_config("num_fewshot")
        # As in the harness, a task that sets 0 keeps it.
        if shots is None or (shots and settings.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    return Suite(name, loaded, settings)


def _documents(task: Any) -> Iterator[str]:
    """Hashes of the documents that are scored, and of those that examples are drawn from."""
    yield content_key([json.dumps(each, default=str) for each in task.eval_docs])
    if task.get_config("num_fewshot"):
        yield content_key([json.dumps(each, default=str) for each in task.fewshot_docs()])


@contextlib.contextmanager
def _one_line(name: str, *mistakes: type[Exception]) -> Iterator[None]:
    """Raise `UserError` for mistakes in the file of a task."""
    try:
        yield
    except mistakes as error:
        raise UserError(f"{KEY}.tasks: {name}: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own bars and messages; what is wrong raises."""
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        yield
