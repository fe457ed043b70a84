"""Log an evaluation to the run's record in MLflow: report, scores, status, and the model.

The model of a finished run is logged with its signature, and registered on request. It has the name
and the parameters of the run. `mlflow.pyfunc.load_model("runs:/<run id>/<name>")` loads it on any
machine with the packages in its requirements.txt: it includes the weights, the tokenizer and the
library's code. Of a LoRA run it includes the adapter, which names the weights that it needs.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infini_model.config import Config, leaves
from infini_model.data.manifest import read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.report import EvaluationResult
from infini_model.runtime.runs import CHECKPOINTS, MODEL, VALIDATION_LOSS
from infini_model.runtime.storage import MANIFEST, is_locked, sha256
from infini_model.training.checkpoint import read_state
from infini_model.training.mlflow_record import DIGEST_LENGTH, MlflowExporter, error_summary
from infini_model.training.profiling import FOLDER, profile_files
from infini_model.training.trackers import is_installed

ALIAS = "best"
# Tag of a logged model: the hash of its checkpoint's manifest.
CHECKPOINT = "checkpoint.sha256"
PACKAGE = Path(__file__).resolve().parents[1]
# Packages that generation imports. MLflow would infer them by loading the model in another process
# and querying a package index.
REQUIRED = ("mlflow", "numpy", "pyarrow", "pydantic", "safetensors", "tokenizers", "torch")

log = logging.getLogger(__name__)


def log_evaluation(
    run_dir: Path, dataset_dir: Path, config: Config, result: EvaluationResult
) -> None:
    """Log report, plots, scores, model and any missing metrics to the run's record in MLflow.

    The run becomes FINISHED if its last step was evaluated. An interrupted run keeps its status, or
    becomes KILLED if it was killed before it could report.

    Warns if MLflow is unavailable; does nothing if it is turned off or not installed.
    """
    if not (config.tracking.mlflow and is_installed("mlflow")):
        return
    try:
        from mlflow.entities import Metric

        sink = MlflowExporter(run_dir, config, None)
        sink.export([])
        is_finished = result.step >= result.last_step
        if is_finished:
            sink.correct_status("FINISHED")
        elif not is_locked(run_dir / CHECKPOINTS / ".lock"):
            sink.correct_status("KILLED")
        target = _record_of(sink, config, result)
        for file in (result.report, result.html, *result.plots):
            folder = file.relative_to(run_dir).parent.as_posix()
            sink.client.log_artifact(target, str(file), None if folder == "." else folder)
        model = None
        if is_finished and config.tracking.log_model and target == sink.run_id:
            model = log_model(sink, dataset_dir, config, result)
        # Of the evaluated step, on the dataset, and of the logged model if there is one.
        now, digest = int(time.time() * 1000), result.dataset_key[:DIGEST_LENGTH]
        dataset = read_manifest(dataset_dir).name
        about = (now, result.step, model and model.model_id, dataset, digest)
        metrics = [Metric(name, value, *about) for name, value in result.metrics.items()]
        sink.client.log_batch(target, metrics=metrics)
        if target != sink.run_id:
            sink.client.set_terminated(target, "FINISHED")
            return
        if model is not None and config.tracking.registered_model is not None:
            register_model(sink, config.tracking.registered_model, model, result)
        # They are large, and MLflow may refuse them.
        for file in profile_files(run_dir):
            sink.client.log_artifact(target, str(file), FOLDER)
    except Exception as error:  # noqa: BLE001 - the results are in the run folder anyway
        log.warning(
            "cannot log the results to MLflow (%s); they are in %s", error_summary(error), run_dir
        )


def _record_of(sink: MlflowExporter, config: Config, result: EvaluationResult) -> str:
    """The id of the run's record; of a new one below it for other scores of the same step."""
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    run = sink.client.get_run(sink.run_id)
    known = {
        each.key: each.value for each in run.data.to_proto().metrics if each.step == result.step
    }
    if all(known.get(name, value) == value for name, value in result.metrics.items()):
        return sink.run_id
    below = sink.client.create_run(
        run.info.experiment_id,
        run_name=f"{run.info.run_name} evaluation",
        tags={MLFLOW_PARENT_RUN_ID: sink.run_id},
    )
    for name, value in leaves(config.evaluation.model_dump(mode="json"), "evaluation."):
        sink.client.log_param(below.info.run_id, name, str(value))
    return str(below.info.run_id)


def log_model(
    sink: MlflowExporter, dataset_dir: Path, config: Config, result: EvaluationResult
) -> Any:
    """Log the evaluated model, unless already logged; returns MLflow's `LoggedModel`.

    `evaluation.sample` and the seed become its default parameters. MLflow's exceptions are
    propagated.
    """
    from mlflow.entities import LoggedModelOutput

    client, run = sink.client, sink.client.get_run(sink.run_id)
    checkpoint = sha256(result.checkpoint / MANIFEST)
    of_this_run = f"source_run_id = '{sink.run_id}'"
    for known in client.search_logged_models([run.info.experiment_id], of_this_run):
        if known.tags.get(CHECKPOINT) == checkpoint and known.status == "READY":
            return known
    model = client.create_logged_model(
        run.info.experiment_id,
        # MLflow takes none of these in the name of a model.
        name=re.sub(r"[/:.%\"']", "-", run.info.run_name),
        source_run_id=sink.run_id,
        params=run.data.params,
        tags={CHECKPOINT: checkpoint, "dataset.key": result.dataset_key},
    )
    weights = result.checkpoint / MODEL
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(temporary) / "saved"
        _save(saved, weights, dataset_dir, config, model)
        client.log_model_artifacts(model.model_id, str(saved))
    # Directly from the checkpoint: `save_model` would copy them to the temporary folder, twice.
    for file in weights.iterdir():
        client.log_model_artifact(model.model_id, str(file), f"artifacts/{MODEL}")
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(sink.run_id, [LoggedModelOutput(model.model_id, result.step)])
    return model


def _save(saved: Path, weights: Path, dataset_dir: Path, config: Config, model: Any) -> None:
    """Save the model without the files of its checkpoint in MLflow's format, in `saved`."""
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    folder = saved.with_name(MODEL)
    folder.mkdir()
    tokenizer = load_dataset_tokenizer(dataset_dir)
    tokenizer.save(folder)
    settings = config.evaluation.sample
    parameters = {
        "max_new_tokens": ("long", settings.max_new_tokens),
        "temperature": ("double", settings.temperature),
        "top_k": ("long", settings.top_k),
        "top_p": ("double", settings.top_p),
        "seed": ("long", config.run.seed),
    }
    save_model(
        str(saved),
        python_model=str(PACKAGE / "evaluation" / "pyfunc.py"),
        code_paths=[str(PACKAGE)],
        artifacts={MODEL: str(folder)},
        # Trained on a GPU and loaded on a CPU, it computes in the same precision.
        model_config={
            "tokenizer": tokenizer.spec,
            "precision": read_state(weights.parent).precision,
        },
        signature=ModelSignature(
            inputs=Schema([ColSpec("string", "prompt")]),
            outputs=Schema([ColSpec("string")]),
            params=ParamSchema([ParamSpec(name, *spec) for name, spec in parameters.items()]),
        ),
        input_example={"prompt": "Once upon a time"},
        # Local versions of PyTorch, such as 2.13.0+cpu, are not on PyPI.
        pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in REQUIRED],
        mlflow_model=Model(
            artifact_path=model.artifact_location,
            run_id=model.source_run_id,
            model_id=model.model_id,
            model_uuid=model.model_id,
        ),
    )


def register_model(sink: MlflowExporter, name: str, model: Any, result: EvaluationResult) -> None:
    """Register a logged model as a version of `name`, unless already registered.

    The version with the lowest validation loss gets the alias `best`. MLflow's exceptions are
    propagated.
    """
    from mlflow.exceptions import MlflowException

    client, ours = sink.client, f"name = '{name}'"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    loss = {name: str(x) for name, x in result.metrics.items() if name == VALIDATION_LOSS}
    if all(v.source != model.artifact_location for v in client.search_model_versions(ours)):
        client.create_model_version(
            name,
            model.artifact_location,
            sink.run_id,
            tags=loss,
            model_id=model.model_id,
            await_creation_for=0,
        )
    scored = [
        (float(each.tags[VALIDATION_LOSS]), int(each.version))
        for each in client.search_model_versions(ours)
        if VALIDATION_LOSS in each.tags
    ]
    if scored:
        client.set_registered_model_alias(name, ALIAS, str(min(scored)[1]))
