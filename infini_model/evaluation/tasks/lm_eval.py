"""Tasks of EleutherAI's lm-evaluation-harness, local ones or its own, measured on our model.

The harness scores; it asks for log-likelihoods of texts and for continuations. A model with a
memory has no longest text: it reads all of a request, segment by segment, in memory that does not
grow. One without reads what any Llama of context `segment_length` reads in the harness: the last
tokens before each scored one, and a long text in disjoint windows. No answer depends on its batch.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from infini_model.config.evaluation import LmEvalConfig
from infini_model.data.sources.files import hub_errors
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.evaluation.context import EvalContext
from infini_model.evaluation.statistics import QUANTILE, bootstrap, wilson
from infini_model.evaluation.task import EvaluationTask, TaskResult, table
from infini_model.model.generate import Sampling, chunk_width, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import LOGITS_AT_ONCE
from infini_model.model.precision import PRECISIONS, Precision
from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import content_key

try:
    import lm_eval
    from jinja2 import TemplateError
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError(
        "evaluation.tasks: lm_eval needs a package: pip install lm-eval -c requirements.lock"
    ) from error

KEY = "evaluation.lm_eval"
# Resamples of metrics whose error has no formula; the harness takes 100,000, which takes minutes.
RESAMPLES = 1000
# More tokens than a stop string has bytes, since the text of a token may depend on those before it.
STOP_CONTEXT = 8


class Settings(NamedTuple):
    """How a text is continued: up to a stop string, the end of text, or `max_gen_toks` tokens."""

    until: tuple[str, ...]
    max_gen_toks: int
    temperature: float
    top_k: int | None
    top_p: float | None

    @classmethod
    def read(cls, arguments: dict[str, Any]) -> Settings:
        """Those of a request, `generation_kwargs` of a harness task.

        Raises `UserError` for one that is not supported.
        """
        given: dict[str, Any] = dict(normalize_gen_kwargs(arguments))
        is_sampled = given.pop("do_sample")
        settings = cls(
            until=tuple(stop for stop in given.pop("until") if stop),
            max_gen_toks=given.pop("max_gen_toks"),
            temperature=float(given.pop("temperature", 1.0 if is_sampled else 0.0)),
            top_k=given.pop("top_k", None) or None,
            top_p=given.pop("top_p", None),
        )
        if given:
            raise UserError(
                f"generation_kwargs: {next(iter(given))} is not supported; there are until, "
                "max_gen_toks, do_sample, temperature, top_k and top_p"
            )
        return settings


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """A causal model as the harness sees it, which splits texts as it does for any model."""

    def __init__(
        self,
        model: InfiniLlama,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        precision: Precision = PRECISIONS["fp32"],
        seed: int = 0,
        on_share: Callable[[float], None] = lambda share: None,  # noqa: ARG005
    ) -> None:
        """Log-likelihoods are of `precision`, texts of the model's, sampled by `seed`.

        `on_share` is called after each batch with the share of the requests that are answered.
        """
        super().__init__()
        self._model, self._text = model, tokenizer
        self._batch_size, self._precision, self._seed = batch_size, precision, seed
        self._on_share = on_share
        bos = tokenizer.bos_token_id
        self._prefix = tokenizer.eos_token_id if bos is None else bos

    @property
    def eot_token_id(self) -> int:
        """The token in front of a text without a context."""
        return self._prefix

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text, with the beginning-of-text token in front unless it is forbidden."""
        ids: list[int] = self._text.encode_batch([string]).ids.tolist()
        bos = self._text.bos_token_id
        begins = add_special_tokens is not False and bos is not None and ids[:1] != [bos]
        return [bos, *ids] if begins and bos is not None else ids

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """The log-likelihood of each text as a whole, after one token of prefix."""
        texts = [self.tok_encode(request.args[0], False) for request in requests]
        return [each for each, _ in self.score([([], text) for text in texts])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.score([(context, ids) for _, context, ids in requests])

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score each continuation after its context, which may be empty.

        Returns:
            Its log-likelihood in nats, and whether each token of it is the most likely one.
        """
        windows = [
            window
            for number, (context, continuation) in enumerate(pairs)
            for window in self._windows(number, context or [self._prefix], continuation)
        ]
        windows.sort(key=lambda window: -len(window[1]))
        found = [(0.0, True)] * len(pairs)
        for first in range(0, len(windows), self._batch_size):
            batch = windows[first : first + self._batch_size]
            numbers, *read = zip(*batch, strict=True)
            for number, total, greedy in zip(numbers, *self._score_batch(*read), strict=True):
                before, was_greedy = found[number]
                found[number] = (before + total, was_greedy and greedy)
            self._on_share((first + len(batch)) / len(windows))
        return found

    def _windows(
        self, request: int, context: list[int], continuation: list[int]
    ) -> Iterator[tuple[int, list[int], int]]:
        """Windows that score each token of the continuation once, as far back as the model reads.

        The request, the ids that are read, and how many of them are scored, the last ones. Those of
        a model without a memory are the harness's own for a context of `segment_length`.
        """
        ids, config = context + continuation, self._model.config
        longest = config.segment_length if config.memory == "none" else len(ids)
        start = len(context)
        while start < len(ids):
            end = min(start + longest, len(ids))
            yield request, ids[max(0, end - 1 - longest) : end], end - start
            start = end

    @torch.inference_mode()
    def _score_batch(
        self, texts: Sequence[list[int]], scored: Sequence[int]
    ) -> tuple[list[float], list[bool]]:
        """Score the last tokens chunk by chunk, in memory that does not grow with the texts."""
        model, device = self._model, self._model.lm_head.weight.device
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        ends, position = torch.tensor([[len(text)] for text in texts]), torch.arange(ids.size(1))
        is_scored = (position < ends) & (position >= ends - torch.tensor(scored)[:, None])
        state = model.empty_state(len(texts))
        totals = torch.zeros(len(texts), dtype=torch.float64)
        is_greedy = torch.ones(len(texts), dtype=torch.bool)
        width = chunk_width(len(texts), model.config.segment_length)
        most = max(1, LOGITS_AT_ONCE // model.lm_head.out_features)
        for start in range(0, ids.size(1) - 1, width):
            end = min(start + width, ids.size(1) - 1)
            with self._precision.autocast(device):
                hidden, state = model.extend(ids[:, start:end].to(device), state)
                asked = is_scored[:, start + 1 : end + 1].nonzero()
                for row, column in (some.unbind(1) for some in torch.split(asked, most)):
                    targets = ids[row, start + 1 + column].to(device)
                    logits = model.lm_head(hidden[row.to(device), column.to(device)]).float()
                    found = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
                    totals.index_add_(0, row, found.double().cpu())
                    is_greedy[row[(logits.argmax(-1) != targets).cpu()]] = False
        return totals.tolist(), is_greedy.tolist()

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """The continuation of each prompt, without the stop string that ended it.

        What is sampled depends on the seed and on the number of the request.

        Raises `UserError` if a setting is not supported or out of its range, or a model without a
        memory has no room for the prompt besides `max_gen_toks`.
        """
        prompts = [self.tok_encode(each.args[0]) or [self._prefix] for each in requests]
        settings = [Settings.read(each.args[1]) for each in requests]
        order = sorted(
            range(len(requests)), key=lambda number: (repr(settings[number]), -len(prompts[number]))
        )
        texts, done = [""] * len(requests), 0
        while done < len(order):
            own = settings[order[done]]
            batch = [n for n in order[done : done + self._batch_size] if settings[n] == own]
            found = self._continue([prompts[number] for number in batch], batch, own)
            for number, text in zip(batch, found, strict=True):
                texts[number] = text
            done += len(batch)
            self._on_share(done / len(order))
        return texts

    def _continue(
        self, prompts: list[list[int]], rows: Sequence[int], settings: Settings
    ) -> list[str]:
        eos, config = self._text.eos_token_id, self._model.config
        if config.memory == "none":  # it reads the last tokens
            room = config.segment_length - settings.max_gen_toks
            if room < 1:
                raise UserError(
                    f"max_gen_toks: got {settings.max_gen_toks}; the model has no memory, and "
                    f"prompt and answer must fit its segment_length of {config.segment_length}"
                )
            prompts = [prompt[-room:] for prompt in prompts]
        new: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        newest = max((len(stop.encode()) for stop in settings.until), default=0) + STOP_CONTEXT
        for tokens in stream(
            self._model,
            prompts,
            Sampling(
                settings.max_gen_toks,
                settings.temperature,
                settings.top_k,
                settings.top_p,
                self._seed,
                eos,
            ),
            rows=rows,
        ):
            for row in tuple(going):
                if (token := tokens[row]) is not None:
                    new[row].append(token)
                # A stop string may span several tokens.
                end = self._text.decode(new[row][-newest:]) if settings.until else ""
                if token in (None, eos) or any(stop in end for stop in settings.until):
                    going.remove(row)
            if not going:
                break
        texts = [self._text.decode(ids) for ids in new]  # without the end of text
        for stop in settings.until:
            texts = [text.partition(stop)[0] for text in texts]
        return texts


class Measured(NamedTuple):
    """A metric of a harness task, or of a group of them.

    Attributes:
        task: Name of the task.
        metric: Name of the metric, with that of its filter if there are several.
        value: Its value.
        interval: Its interval of 95%; None where nothing is known of its error.
        documents: Number of documents that it is of.
        shots: Examples in front of each question.
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
        found = {name: _measure(name, each, context) for name, each in self._loaded.items()}
        measured = [each for some in found.values() for each in some]
        named = {f"evaluation/{each.task}_{each.metric}": each for each in measured}
        summary = []
        for name, some in found.items():
            # The metric of a group as a whole, if it has one.
            for first in [each for each in some if each.task == name][:1] or some[:1]:
                interval = f" ({first.span})" if first.interval else ""
                summary.append(
                    f"`{first.task}` of the lm-evaluation-harness: {first.metric} is "
                    f"**{first.value:.4f}**{interval} over {first.documents:,} documents."
                )
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
    folder = settings.include_path and settings.include_path.expanduser().resolve()
    if folder is not None and not folder.is_dir():
        raise UserError(f"{KEY}.include_path: {folder} is not a folder")
    with _quiet():
        # Listing the harness's own 15,000 tasks takes a while.
        manager = TaskManager(include_path=folder and str(folder), include_defaults=folder is None)
        if folder is not None and not set(settings.tasks) <= set(manager.all_tasks):
            manager = TaskManager(include_path=folder and str(folder))
        return {name: _load(name, manager, settings) for name in settings.tasks}


def _load(name: str, manager: Any, settings: LmEvalConfig) -> dict[str, Any]:
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
        if shots is None or (shots and settings.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    return loaded


def _measure(name: str, loaded: dict[str, Any], context: EvalContext) -> list[Measured]:
    """The metrics of what one name stands for, kept or measured."""
    limit, seed = context.config.evaluation.lm_eval.limit, context.config.run.seed
    reported = 0

    def report(share: float) -> None:
        nonlocal reported
        # A task with requests of two kinds goes through its documents twice.
        done = max(reported, int(share * _documents(loaded, limit)))
        context.on_windows(done - reported)
        reported = done

    def measure() -> list[dict[str, Any]]:
        model = HarnessModel(
            context.model,
            load_dataset_tokenizer(context.dataset_dir),
            batch_size=context.config.evaluation.batch_size,
            precision=context.precision,
            seed=seed,
            on_share=report,
        )
        # It would fork, which PyTorch's threads do not survive.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        random.seed(seed)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed)
        with _quiet(), _one_line(name):
            results = lm_eval.evaluate(
                model,
                loaded,
                limit=limit,
                bootstrap_iters=RESAMPLES,
                confirm_run_unsafe_code=False,
            )
        return [each._asdict() for each in _read(results, loaded["tasks"])]

    # The configurations and documents as they are after the tasks' own processing.
    contents = [
        [task, str(own.dump_config()), *_hashes(own)] for task, own in loaded["tasks"].items()
    ]
    identity = {"content": content_key(contents), "limit": limit, "harness": version("lm_eval")}
    kept = context.cache("lm_eval", identity).get_or_compute("measured", measure)
    report(1.0)
    return [Measured(**each) for each in kept]


def _documents(loaded: dict[str, Any], limit: int | None) -> int:
    """Number of documents to score."""
    sizes = [len(task.eval_docs) for task in loaded["tasks"].values()]
    return sum(min(size, limit or size) for size in sizes)


def _hashes(task: Any) -> Iterator[str]:
    """Of the documents that are scored, and of those that examples are drawn from."""
    yield content_key([json.dumps(each, default=str) for each in task.eval_docs])
    if task.get_config("num_fewshot"):
        yield content_key([json.dumps(each, default=str) for each in task.fewshot_docs()])


def _read(results: dict[str, Any], tasks: dict[str, Any]) -> Iterator[Measured]:
    """The finite metrics in what `lm_eval.evaluate` returned for `tasks`, by name."""
    for name, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_finite(value):
                continue
            samples = results["samples"].get(name, [])
            scores = [
                each[metric] for each in samples if each["filter"] == chosen and metric in each
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
