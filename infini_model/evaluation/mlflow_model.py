"""Log a finished run's model to MLflow, with its signature, and register it on request.

It has the name and the parameters of the run. `mlflow.pyfunc.load_model("runs:/<run id>/<name>")`
loads it on any machine with the packages in its requirements.txt: it includes the weights, the
tokenizer and the library's code. Of a LoRA run it includes the adapter, which names the weights
that it needs.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.reporting.report import EvaluationResult
from infini_model.model.hf import ADAPTER_CONFIG, CONFIG, INDEX
from infini_model.runtime.runs import MODEL, VALIDATION_LOSS
from infini_model.runtime.storage import MANIFEST, sha256
from infini_model.training.checkpoint import read_state
from infini_model.training.mlflow_record import MlflowExporter

ALIAS = "best"
# Tag of a logged model: the hash of its checkpoint's manifest.
CHECKPOINT = "checkpoint.sha256"
PACKAGE = Path(__file__).resolve().parents[1]
# Packages that generation imports. MLflow would infer them by loading the model in another process
# and querying a package index.
REQUIRED = ("mlflow", "numpy", "pyarrow", "pydantic", "safetensors", "tokenizers", "torch")


def log_model(
    sink: MlflowExporter,
    dataset_dir: Path,
    settings: SampleConfig,
    seed: int,
    result: EvaluationResult,
) -> Any:
    """Log the evaluated model, unless already logged; returns MLflow's `LoggedModel`.

    `settings` and `seed` become its default parameters. MLflow's exceptions are propagated.
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
    try:
        _upload(client, model, dataset_dir, settings, seed, result.checkpoint / MODEL)
    except Exception:
        with contextlib.suppress(Exception):
            client.finalize_logged_model(model.model_id, "FAILED")
        raise
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(sink.run_id, [LoggedModelOutput(model.model_id, result.step)])
    return model


def _upload(
    client: Any,
    model: Any,
    dataset_dir: Path,
    settings: SampleConfig,
    seed: int,
    weights: Path,
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = _save(Path(temporary), weights, dataset_dir, settings, seed, model)
        client.log_model_artifacts(model.model_id, str(folder))
    # Directly from the checkpoint: `save_model` would copy them to the temporary folder, twice.
    for file in weights.glob("*.safetensors"):
        client.log_model_artifact(model.model_id, str(file), f"artifacts/{MODEL}")


def _save(
    temporary: Path,
    weights: Path,
    dataset_dir: Path,
    settings: SampleConfig,
    seed: int,
    model: Any,
) -> Path:
    """Save the model without its weights in MLflow's format; returns the folder."""
    from mlflow.models import Model
    from mlflow.pyfunc import save_model

    folder = temporary / MODEL
    folder.mkdir()
    for name in (ADAPTER_CONFIG, CONFIG, INDEX):
        if (weights / name).is_file():
            (folder / name).write_bytes((weights / name).read_bytes())
    tokenizer = load_dataset_tokenizer(dataset_dir)
    tokenizer.save(folder)
    saved = temporary / "saved"
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
        signature=_signature(settings, seed),
        input_example={"prompt": "Once upon a time"},
        pip_requirements=_requirements(),
        mlflow_model=Model(
            artifact_path=model.artifact_location,
            run_id=model.source_run_id,
            model_id=model.model_id,
            model_uuid=model.model_id,
        ),
    )
    return saved


def _signature(settings: SampleConfig, seed: int) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    parameters = {
        "max_new_tokens": ("long", settings.max_new_tokens),
        "temperature": ("double", settings.temperature),
        "top_k": ("long", settings.top_k),
        "top_p": ("double", settings.top_p),
        "seed": ("long", seed),
    }
    return ModelSignature(
        inputs=Schema([ColSpec("string", "prompt")]),
        outputs=Schema([ColSpec("string")]),
        params=ParamSchema([ParamSpec(name, *spec) for name, spec in parameters.items()]),
    )


def _requirements() -> list[str]:
    # Local versions of PyTorch, such as 2.13.0+cpu, are not on PyPI.
    return [f"{name}=={version(name).partition('+')[0]}" for name in REQUIRED]


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
    if all(v.source != model.artifact_location for v in client.search_model_versions(ours)):
        client.create_model_version(
            name,
            model.artifact_location,
            sink.run_id,
            tags={VALIDATION_LOSS: str(result.metrics[VALIDATION_LOSS])}
            if VALIDATION_LOSS in result.metrics
            else {},
            model_id=model.model_id,
            await_creation_for=0,
        )
    versions = client.search_model_versions(ours)
    scored = [
        (float(v.tags[VALIDATION_LOSS]), int(v.version))
        for v in versions
        if VALIDATION_LOSS in v.tags
    ]
    if scored:
        client.set_registered_model_alias(name, ALIAS, str(min(scored)[1]))
