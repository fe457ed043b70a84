"""Evaluate a trained run: writes its report and `plots/*.png` and returns the result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infini_model.config import Config
from infini_model.evaluation.reporting import markdown, plots
from infini_model.evaluation.reporting.page import to_html
from infini_model.evaluation.reporting.summary import summary_section
from infini_model.evaluation.subject import Pass, Subject
from infini_model.evaluation.tasks.task import EvaluationTask, Picture, TaskResult, load_task
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import Line, read_metrics
from infini_model.runtime.runs import EVALUATION, REPORT, REPORT_PAGE, record_evaluation
from infini_model.runtime.storage import atomic_file, lock, remove_leftovers


class EvaluationResult(BaseModel):
    """The result of an evaluation.

    Attributes:
        step: Step of the evaluated checkpoint.
        last_step: Total optimizer steps of the run.
        checkpoint: Folder of the checkpoint.
        dataset_key: Key of the dataset that was scored.
        tasks: The result of each task by name, in the order of the report.
        report: Path of report.md.
        html: Path of report.html, the same for a browser.
        plots: Paths of the plots.
    """

    model_config = ConfigDict(frozen=True)

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
        return {
            name: value for result in self.tasks.values() for name, value in result.metrics.items()
        }

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The intervals of those metrics that have some."""
        return {
            name: each for result in self.tasks.values() for name, each in result.intervals.items()
        }


def evaluate_run(
    run_dir: Path,
    dataset_dir: Path,
    config: Config,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate the newest checkpoint of a run; writes the report, then `evaluation.json`.

    The same checkpoint, dataset and settings give the same numbers and the same sample.

    Args:
        run_dir: The run folder.
        dataset_dir: A dataset folder made with the run's tokenizer.
        config: The run's configuration; `evaluation` sets what is measured.
        progress: Called with the number of windows scored and the total.

    Raises:
        CheckpointError: There is no checkpoint or no metrics, the model's vocabulary is smaller
            than the dataset's, or the loss is not finite.
        DataError: The folder is not a dataset, or is damaged.
    """
    lines = read_metrics(run_dir)
    if not lines:
        raise CheckpointError(f"{run_dir / 'metrics.jsonl'}: no metrics found; train first")
    with _evaluating(run_dir):
        return _evaluate(run_dir, dataset_dir, config, lines, progress)


@contextlib.contextmanager
def _evaluating(run_dir: Path) -> Iterator[None]:
    """Share the lock of the run's evaluations; the first deletes what killed ones left."""
    path = run_dir / ".evaluation.lock"
    with lock(path, wait=False) as is_first:
        if is_first:
            for place in (run_dir / "plots", *(run_dir / "evaluation").glob("*")):
                remove_leftovers(place)
            for name in (REPORT, REPORT_PAGE, EVALUATION):
                remove_leftovers(run_dir, name)
    with lock(path, shared=True):
        yield


def _evaluate(
    run_dir: Path,
    dataset_dir: Path,
    config: Config,
    lines: list[Line],
    progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    subject = Subject(run_dir, dataset_dir, config)
    tasks = {name: load_task(name) for name in config.evaluation.tasks}
    for task in tasks.values():
        task.check(subject)
    if progress is not None:
        _report_progress(subject, tasks.values(), progress)
    results = {name: task.run(subject) for name, task in tasks.items()}
    curves = _draw_curves(subject, lines)
    measured = [picture.path for result in results.values() for picture in result.pictures]
    result = EvaluationResult(
        step=subject.position.step,
        last_step=subject.last_step,
        checkpoint=subject.checkpoint,
        dataset_key=subject.manifest.key,
        tasks=results,
        report=run_dir / REPORT,
        html=run_dir / REPORT_PAGE,
        plots=[*(picture.path for picture in curves), *measured],
    )
    titled = [(tasks[name].title, found) for name, found in results.items()]
    _write(result, run_dir, _text(subject, titled, curves, lines))
    record_evaluation(run_dir, result.step, result.dataset_key, result.metrics, result.intervals)
    return result


def _write(result: EvaluationResult, run_dir: Path, text: str) -> None:
    """Write the report as Markdown and as a page."""
    pictures = {path.relative_to(run_dir).as_posix(): path for path in result.plots}
    page = to_html(text, run_dir.name, pictures)
    for path, content in ((result.report, text), (result.html, page)):
        with atomic_file(path) as temporary:
            temporary.write_text(content, encoding="utf-8")


def _report_progress(
    subject: Subject, tasks: Collection[EvaluationTask], progress: Callable[[int, int], None]
) -> None:
    """Report the windows and sequences that `subject` has scored to `progress`."""
    passes = set[Pass]().union(*(task.scores(subject) for task in tasks))
    total = sum(subject.sample_size(each.split) for each in passes)
    total += sum(task.sequences(subject) for task in tasks)
    done = 0

    def advance(windows: int) -> None:
        nonlocal done
        done += windows
        progress(done, total)

    subject.on_windows = advance


def _text(
    subject: Subject,
    titled: Sequence[tuple[str, TaskResult]],
    curves: Sequence[Picture],
    lines: list[Line],
) -> str:
    """The report as Markdown."""
    run_dir = subject.run_dir
    sections = [
        f"# {run_dir.name}",
        summary_section(subject, [result for _, result in titled]),
        "## Model and training",
        markdown.model_section(subject),
    ]
    for title, result in titled:
        sections += [f"## {title}", result.section, *_shown(result.pictures, run_dir)]
    sections += ["## Speed", markdown.speed_section(lines)]
    if curves:
        sections += ["## Curves", *_shown(curves, run_dir)]
    sections += ["## Reproduce", markdown.reproduce_section(run_dir)]
    return "\n\n".join(sections) + "\n"


def _shown(pictures: Sequence[Picture], run_dir: Path) -> list[str]:
    return [markdown.picture(each.caption, each.path, run_dir) for each in pictures]


def _draw_curves(subject: Subject, lines: list[Line]) -> list[Picture]:
    """The curves of the training, if it took a step."""
    if not plots.series(lines, "train/loss")[0]:
        return []
    folder, clip = subject.plots_dir, subject.config.training.max_grad_norm
    drawn = {
        "Training and validation loss": plots.plot_loss(lines, folder / "loss.png"),
        "Learning rate": plots.plot_learning_rate(lines, folder / "learning_rate.png"),
        "Gradient norm before clipping": plots.plot_gradient_norm(
            lines, clip, folder / "gradient_norm.png"
        ),
        "Tokens per second, and share of a step spent waiting for data": plots.plot_throughput(
            lines, folder / "throughput.png"
        ),
    }
    return [Picture(path=path, caption=caption) for caption, path in drawn.items()]
