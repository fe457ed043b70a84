"""Evaluate a trained run: writes its report and `plots/*.png` and returns the result."""

from __future__ import annotations

import shlex
import statistics
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from infini_model.config import Config
from infini_model.evaluation.context import CheckpointContext, EvalContext
from infini_model.evaluation.pages import bullets, estimate, fenced, images, table, write_pages
from infini_model.evaluation.plots import plot_training
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.evaluation.tasks import load_task
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.records import Record
from infini_model.runtime.runs import REPORT, REPORT_PAGE, record_evaluation
from infini_model.training.profiling import OPERATORS

# Acceptable share of a step spent waiting for data.
MAX_WAIT_SHARE = 0.01


class EvaluationResult(Record):
    """The result of an evaluation of the checkpoint of `step`; the run is to have `last_step`.

    The results of `tasks` stand by name, in the order of the report; `report` is Markdown, and
    `html` the same for a browser.
    """

    step: int
    last_step: int
    checkpoint: Path
    dataset_key: str
    tasks: dict[str, TaskResult]
    report: Path
    html: Path
    plots: list[Path]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of all tasks, `evaluation/test_loss` and so on."""
        return {k: v for result in self.tasks.values() for k, v in result.metrics.items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The intervals of those metrics that have some."""
        return {k: v for result in self.tasks.values() for k, v in result.intervals.items()}


def evaluate_run(
    run_dir: Path,
    dataset_dir: Path,
    config: Config,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate the newest checkpoint of a run; writes the report, then `evaluation.json`.

    The same checkpoint, dataset and settings give the same numbers and the same sample. The dataset
    is one made with the run's tokenizer; `progress` is called with the number of windows scored and
    the total.

    Raises `CheckpointError` if there are no metrics or the loss is not finite, what
    `CheckpointContext` does, and the `UserError` of a task, before another is scored.
    """
    lines = read_metrics(run_dir)
    if not lines:
        raise CheckpointError(f"{run_dir / 'metrics.jsonl'}: no metrics found; train first")
    context = CheckpointContext(run_dir, dataset_dir, config)
    tasks = {name: load_task(name) for name in config.evaluation.tasks}
    for task in tasks.values():
        task.check(context)
    if progress is not None:
        _report_progress(context, [*tasks.values()], progress)
    results = {name: task.run(context) for name, task in tasks.items()}
    curves = dict[str, Path]()
    if any("train/loss" in line for line in lines):
        curves = plot_training(lines, config.training.max_grad_norm, context.plots_dir)
    shown = [path for each in results.values() for path in each.pictures.values()]
    result = EvaluationResult(
        step=context.position.step,
        last_step=context.last_step,
        checkpoint=context.checkpoint,
        dataset_key=context.manifest.key,
        tasks=results,
        report=run_dir / REPORT,
        html=run_dir / REPORT_PAGE,
        plots=[*curves.values(), *shown],
    )
    titled = [(tasks[name].title, found) for name, found in results.items()]
    text = _text(context, titled, curves, lines)
    write_pages(text, run_dir.name, result.report, result.html, result.plots)
    measured = (result.dataset_key, result.metrics, result.intervals)
    settings = config.evaluation.model_dump(mode="json")
    record_evaluation(run_dir, result.step, *measured, settings)
    return result


def _report_progress(
    context: EvalContext, tasks: Sequence[EvaluationTask], progress: Callable[[int, int], None]
) -> None:
    """Report the windows and sequences that `context` has scored to `progress`."""
    # Each pass is scored once, for all tasks.
    total, done = sum(ChainMap(*(task.work(context) for task in tasks)).values()), 0

    def advance(windows: int) -> None:
        nonlocal done
        done += windows
        progress(done, total)

    context.on_windows = advance


def _text(
    context: CheckpointContext,
    titled: Sequence[tuple[str, TaskResult]],
    curves: Mapping[str, Path],
    lines: Sequence[Line],
) -> str:
    """The report as Markdown: what was found and what to do, all metrics, then the details."""
    run_dir, results = context.run_dir, [result for _, result in titled]
    found = [sentence for result in results for sentence in result.summary]
    to_do = [sentence for result in results for sentence in result.advice]
    sections = [f"# {run_dir.name}", "## Summary", bullets([_trained(context), *found])]
    if to_do:
        sections += ["What to do next:", bullets(to_do)]
    rows = [
        (f"`{name.removeprefix('evaluation/')}`", estimate(value, result.intervals.get(name, ())))
        for result in results
        for name, value in result.metrics.items()
    ]
    if rows:
        sections.append(table(("Metric", "Value (interval of 95%)"), rows))
    sections += ["## Model and training", _model_section(context, lines)]
    for title, result in titled:
        sections += [f"## {title}", result.section, *images(result.pictures, run_dir)]
    sections += ["## Speed", _speed_section(lines)]
    if (operators := run_dir / OPERATORS).exists():
        dearest = operators.read_text(encoding="utf-8")
        sections += ["The operators that took most of the steps profiled:", fenced(dearest)]
    if curves:
        sections += ["## Curves", *images(curves, run_dir)]
    config, name = shlex.quote(str(run_dir / "config.yaml")), shlex.quote(run_dir.name)
    commands = (
        "```sh\n"
        f"infini run --config {config} run.name={name}-again  # repeat the run\n"
        f"infini evaluate --config {config} run.name={name}  # repeat this report\n"
        "```"
    )
    return "\n\n".join([*sections, "## Reproduce", commands]) + "\n"


def _trained(context: CheckpointContext) -> str:
    """What was trained, for how long, and on what."""
    position, config = context.position, context.config
    parameters = _parameters(context.model)
    steps = f"{position.step:,} steps"
    if position.step < context.last_step:
        steps = f"{position.step:,} of {context.last_step:,} steps"
    elif position.step < context.planned_steps:
        steps += f" of {context.planned_steps:,} (stopped early)"
    tokens = f"{position.windows_read * config.packing.context_length:,} tokens"
    if config.packing.mode != "packed":
        tokens += " (including padding)"
    return (
        f"An Infini-Llama of {parameters:,} parameters (memory: {context.model.config.memory}, "
        f"objective: {config.training.objective}), trained for {steps}, {tokens} "
        f"of `{context.manifest.name}`."
    )


def _parameters(model: InfiniLlama) -> int:
    """The number of a model's parameters; in 16 bits a tied output layer is a copy."""
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    return sum(p.numel() for name, p in model.named_parameters() if name not in tied)


def _model_section(context: CheckpointContext, lines: Sequence[Line]) -> str:
    """A table of the model and its dataset."""
    model, config, manifest = context.model, context.config, context.manifest
    position, shape = context.position, model.config
    parameters = _parameters(model)
    own = sum(p.numel() for name, p in model.named_parameters() if name.endswith(MEMORY_PARAMETERS))
    counts = f"{parameters:,}, including {own:,} of the memory"
    if model.lora is not None:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        counts += f"; {trained:,} are trained by LoRA, the others frozen"
    context_length = config.packing.context_length
    shifts = {"keys": shape.memory_key_shift, "queries": shape.memory_query_shift}
    memory = ", ".join(
        [shape.memory, *(f"{name} shifted" for name, is_on in shifts.items() if is_on)]
    )
    if not shape.has_past:
        memory = "none (segments are independent)"
    sees_all = shape.bidirectional and not shape.has_past
    segments = (
        f"{context_length:,} tokens in {context_length // shape.segment_length} segments of "
        f"{shape.segment_length:,}"
    )
    window = f"its segment, {shape.window_segments} before it, {shape.window_sinks} sinks"
    dataset = f"`{manifest.name}`, key `{manifest.key[:16]}`, {manifest.tokens:,} tokens"
    if position.dataset_key != manifest.key:
        dataset += f" (trained on a different one, key `{position.dataset_key[:16]}`)"
    record, branch = context.record, list[tuple[str, str]]()
    if record is not None and record.parent is not None:
        branch.append(("Branch of", f"`{record.parent}`, step {record.parent_step:,}"))
    rows = [
        ("Parameters", counts),
        (
            "Shape",
            f"{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, "
            f"{shape.num_attention_heads} query and {shape.key_value_heads} key-value heads, "
            f"feed-forward {shape.intermediate_size}, vocabulary {shape.vocab_size:,}",
        ),
        ("Context", f"{context_length:,} tokens, seen as a whole" if sees_all else segments),
        ("Window", "" if sees_all else window),
        ("Memory", "none" if sees_all else memory),
        ("Dataset", dataset),
        *branch,
        *_epochs_of_sources(lines),
        ("Seed", str(position.seed)),
    ]
    return table(("", ""), rows).replace("---:", "---")


def _epochs_of_sources(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """A row for the newest epochs of named sources, if there are any."""
    newest = {name: value for line in lines for name, value in line.items()}
    found = [(name.split("/"), value) for name, value in newest.items() if name.endswith("/epochs")]
    epochs = [f"{source} {value:.2f}" for (_, source, _), value in found]
    return [("Epochs by source", ", ".join(epochs))] if epochs else []


def _speed_section(lines: Sequence[Line]) -> str:
    """Training throughput, and whether data loading kept up."""
    timed = [line for line in lines if line.get("train/step_seconds", 0.0) > 0.0]
    if not timed:
        return "No steps were timed."
    rate = statistics.median(line["train/tokens_per_second"] for line in timed)
    waited = sum(line.get("train/data_wait_seconds", 0.0) for line in timed)
    share = waited / sum(line["train/step_seconds"] for line in timed)
    summary = f"{rate:,.0f} tokens per second; {share:.2%} of step time was spent waiting for data."
    if share <= MAX_WAIT_SHARE:
        return summary
    return (
        f"{summary} That is over {MAX_WAIT_SHARE:.0%}: put the dataset folder on a local disk, "
        "and leave memory free for the page cache and CPU cores free for the loader."
    )
