"""Log an evaluation to a run's record in MLflow: report, scores, status and the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from infini_model.config import Config
from infini_model.data.manifest import read_manifest
from infini_model.evaluation.mlflow_model import log_model, register_model
from infini_model.evaluation.reporting.report import EvaluationResult
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import CHECKPOINTS
from infini_model.runtime.storage import lock
from infini_model.training.mlflow_record import DIGEST_LENGTH, MlflowExporter, error_summary

log = logging.getLogger(__name__)


def log_evaluation(
    run_dir: Path, dataset_dir: Path, config: Config, result: EvaluationResult
) -> bool:
    """Log report, plots, scores, model and any missing metrics to the run's record in MLflow.

    The run becomes FINISHED if its last step was evaluated. An interrupted run keeps its status, or
    becomes KILLED if it was killed before it could report.

    Returns False, with a warning, if MLflow is unavailable; False too if it is turned off.
    """
    if not config.tracking.mlflow:
        return False
    try:
        sink = MlflowExporter(run_dir, config, None)
        sink.export(read_metrics(run_dir))
        is_finished = result.step >= result.last_step
        if is_finished:
            sink.correct_status("FINISHED")
        elif not _is_training(run_dir):
            sink.correct_status("KILLED")
        _log_files(sink, run_dir, [result.report, result.html, *result.plots])
        dataset = read_manifest(dataset_dir).name
        if not (is_finished and config.tracking.log_model):
            _log_scores(sink, result, dataset, None)
            return True
        model = log_model(sink, dataset_dir, config.evaluation.sample, config.run.seed, result)
        _log_scores(sink, result, dataset, model.model_id)
        if config.tracking.registered_model is not None:
            register_model(sink, config.tracking.registered_model, model, result)
    except Exception as error:  # noqa: BLE001 - the results are in the run folder anyway
        log.warning(
            "cannot log the results to MLflow (%s); they are in %s", error_summary(error), run_dir
        )
        return False
    return True


def _is_training(run_dir: Path) -> bool:
    with lock(run_dir / CHECKPOINTS / ".lock", wait=False) as free:
        return not free


def _log_files(sink: MlflowExporter, run_dir: Path, files: Iterable[Path]) -> None:
    """Log files under their paths in the run folder."""
    for file in files:
        folder = file.relative_to(run_dir).parent.as_posix()
        sink.client.log_artifact(sink.run_id, str(file), None if folder == "." else folder)


def _log_scores(
    sink: MlflowExporter, result: EvaluationResult, dataset: str, model_id: str | None
) -> None:
    """Log the scores on the dataset at the evaluated step, of the logged model if there is one."""
    from mlflow.entities import Metric

    now, digest = int(time.time() * 1000), result.dataset_key[:DIGEST_LENGTH]
    metrics = [
        Metric(name, value, now, result.step, model_id, dataset, digest)
        for name, value in result.metrics.items()
    ]
    sink.client.log_batch(sink.run_id, metrics=metrics)
