"""Tasks of EleutherAI's lm-evaluation-harness, local ones or its own, measured on our model.

The harness asks for log-likelihoods of texts and for continuations (`HarnessModel`) and scores;
metrics, standard errors and their table are its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import random
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from infini_model.config.evaluation import LmEvalConfig
from infini_model.data.sources.files import hub_errors
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.context import EvalContext, Pass
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.runtime.errors import UserError

try:
    import lm_eval
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise UserError(
        "evaluation.tasks: lm_eval needs a package: pip install 'infini-model[eval]'"
    ) from error

KEY = "evaluation.lm_eval"
# Resamples for errors that have no formula; the harness's default, 100,000, takes minutes.
RESAMPLES = 1000


class LmEval(EvaluationTask):
    """Runs the tasks that `evaluation.lm_eval` names."""

    title = "lm-evaluation-harness"
    # What the harness has loaded for each name: a task, or those of a group.
    _loaded: dict[str, dict[str, Any]]

    def check(self, context: EvalContext) -> None:
        """Load the documents of all tasks; refuse a wrong name, and a model of diffusion."""
        objective = context.config.training.objective
        if objective != "causal":
            raise UserError(
                f"evaluation.tasks: lm_eval needs a model of training.objective=causal, this one "
                f"is of {objective}"
            )
        tokenizer = load_dataset_tokenizer(context.dataset_dir)
        self._loaded = load_tasks(context.config.evaluation.lm_eval, tokenizer)

    def work(self, context: EvalContext) -> dict[Pass | str, int]:
        limit = context.config.evaluation.lm_eval.limit
        return {self.title: sum(_documents(loaded, limit) for loaded in self._loaded.values())}

    def run(self, context: EvalContext) -> TaskResult:
        metrics, sections = dict[str, float](), []
        limit = context.config.evaluation.lm_eval.limit
        for name, loaded in self._loaded.items():
            results = _measure(loaded, name, context)
            context.on_windows(_documents(loaded, limit))
            for task, found in results["results"].items():
                metrics |= {
                    # The harness calls them `acc,none` and `acc_stderr,none`, after its filter.
                    f"evaluation/{task}_{key.removesuffix(',none').replace(',', '_')}": value
                    for key, value in found.items()
                    if "," in key and isinstance(value, int | float) and math.isfinite(value)
                    # RULER's mark of a length that was not asked for.
                    if not (key[0].isdecimal() and value < 0)
                }
            scored = ", ".join(
                f"{each['effective']:,} of {each['original']:,} ({task})"
                for task, each in results["n-samples"].items()
            )
            sections += [make_table(results).strip(), f"Documents scored: {scored}."]
        return TaskResult(metrics=metrics, section="\n\n".join(sections))


def load_tasks(settings: LmEvalConfig, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Load the tasks that `settings` names, by these names; `tokenizer` measures RULER's texts.

    Raises `UserError` if none is named, or one is unknown, lacks a package or runs code that a
    model writes, `DataError` if documents cannot be read, `UnreachableError` if the hub does not
    answer.
    """
    if not settings.tasks:
        raise UserError(f"{KEY}.tasks: names no task of the harness; set it to those to run")
    folder = settings.include_path and settings.include_path.resolve()
    if folder is not None and not folder.is_dir():
        raise UserError(f"{KEY}.include_path: {folder} is not a folder")
    lengths, saved = settings.lengths, tempfile.TemporaryDirectory(prefix="infini-tokenizer-")

    @cache  # listing the harness's own 15,000 tasks takes a while
    def manager(*, of_babilong: bool) -> Any:
        metadata: dict[str, Any] = {}
        if lengths is not None:
            thousands = 1 << (max(lengths) // 1024).bit_length() - 1  # it has powers of two
            metadata["max_seq_lengths"] = f"{thousands}k" if of_babilong else lengths
        if isinstance(tokenizer, BPETokenizer):
            metadata["tokenizer"] = saved.name
        path, is_own = folder and str(folder), folder is not None
        found = TaskManager(include_path=path, include_defaults=not is_own, metadata=metadata)
        if is_own and not set(settings.tasks) <= set(found.all_tasks):
            found = TaskManager(include_path=path, metadata=metadata)
        return found

    # RULER prints how long its texts become.
    with saved, _quiet(), contextlib.redirect_stdout(io.StringIO()):
        tokenizer.save(Path(saved.name))
        return {
            name: _load(name, manager(of_babilong="babilong" in name), settings.num_fewshot)
            for name in settings.tasks
        }


def _load(name: str, manager: Any, num_fewshot: int | None) -> dict[str, Any]:
    if name not in manager.all_tasks:
        raise UserError(f"{KEY}.tasks: the harness has no task {name!r}")
    # An unknown key, a package that is missing, a tokenizer of bytes, texts that nltk lacks.
    mistakes = TypeError, ImportError, AssertionError, LookupError
    with _one_line(name, *mistakes), hub_errors(f"{KEY}.tasks: {name}"):
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


def _measure(loaded: dict[str, Any], name: str, context: EvalContext) -> dict[str, Any]:
    """The harness's results of what one name stands for."""
    from infini_model.evaluation.harness import HarnessModel

    limit, seed = context.config.evaluation.lm_eval.limit, context.config.run.seed
    model = HarnessModel(
        context.model,
        load_dataset_tokenizer(context.dataset_dir),
        batch_size=context.config.evaluation.batch_size,
        seed=seed,
        on_batch=partial(context.on_windows, 0),
    )
    # It would fork, which PyTorch's threads do not survive.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    random.seed(seed)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=seed)
    with _quiet(), _one_line(name):
        results: dict[str, Any] = lm_eval.evaluate(
            model, loaded, limit=limit, bootstrap_iters=RESAMPLES
        )
    return results


@contextlib.contextmanager
def _one_line(name: str, *mistakes: type[Exception]) -> Iterator[None]:
    """Raise `UserError` for mistakes in the file of a task, a template that does not fit first."""
    try:
        yield
    except (TemplateError, *mistakes) as error:  # type: ignore[misc]  # jinja2 is not typed
        raise UserError(f"{KEY}.tasks: {name}: {' '.join(str(error).split())}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own bars and messages; what is wrong raises."""
    for name in ("lm_eval", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):
        yield
