"""The results of an evaluation in MLflow: the run's status, and a loadable model."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
from commands import eventually
from mlflow_server import mlflow_server
from records import Record
from trained_run import Made

from infini_model.config import validate
from infini_model.evaluation.mlflow import log_evaluation
from infini_model.evaluation.task import TaskResult
from infini_model.runtime.storage import lock, write_json
from infini_model.serving.model import Model
from infini_model.training.mlflow_record import end_record, read_mlflow_record

DATASET = {"name": "corpus", "key": "d" * 64, "path": "/data/corpus"}
SCORE = "evaluation/test_loss"
PROMPT = "the memory of a "
DRAW = {"max_new_tokens": 40, "temperature": 0.7, "top_k": 30, "top_p": 0.9}
SEED = 5
# Of the models that are logged: those of their runs.
NAMES = ("first", "run")
# Loads models like a user without the project, outside its source folder.
LOAD = """
import json, os, sys
os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
import mlflow
uri, prompt, params, *models = sys.argv[1:]
mlflow.set_tracking_uri(uri)
loaded = [mlflow.pyfunc.load_model(model) for model in models]
texts = [model.predict({"prompt": prompt}, params=json.loads(params)) for model in loaded]
import infini_model
print(json.dumps([infini_model.__file__, *texts]))
"""


def evaluated(root, **overrides):
    """(config, dataset folder, run folder, result) of a finished run below `root`."""
    # Not the precision that a CPU would choose: what is logged computes as it was trained.
    own = {"evaluation.tasks": ["loss"], "training.precision": "bf16"} | overrides
    made = Made(root, **own)
    # Where `infini generate` finds the tokenizer.
    write_json(made.run_dir / "run.json", {"dataset": str(made.dataset), "dataset_key": "k"})
    return made.config(), made.dataset, made.run_dir, made.evaluated()[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return evaluated(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture
def again(made, tmp_path):
    """Evaluates the run at `step`, under another name that is not in MLflow."""
    config, dataset, run_dir, result = made

    def evaluate(name="run", step=40, loss=None, **tracking):
        target = tmp_path / name
        target.mkdir(exist_ok=True)
        shutil.copy(run_dir / "metrics.jsonl", target)
        files = {"report": target / "report.md", "html": target / "report.html"}
        for file in files.values():
            shutil.copy(run_dir / file.name, target)
        changes = {"step": step, "plots": [], **files}
        if loss is not None:
            metrics = {"evaluation/validation_loss": loss}
            changes["tasks"] = {"loss": TaskResult(section="", metrics=metrics)}
        tree = config.model_dump(mode="json")
        settled = validate(tree | {"tracking": tree["tracking"] | tracking})
        log_evaluation(target, dataset, settled, result.model_copy(update=changes))
        return target

    return evaluate


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def in_mlflow(run_dir):
    record = read_mlflow_record(run_dir)
    return client(record["tracking_uri"]).get_run(record["run_id"])


def models_of(run_dir):
    run = in_mlflow(run_dir)
    return [] if run.outputs is None else run.outputs.model_outputs


def load(uri, *models, cwd):
    """Where the library was loaded from, and each model's continuation of the prompt."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, uri, PROMPT, json.dumps(DRAW | {"seed": SEED}), *models],
        cwd=cwd,
        env=inherited | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def generated(config, run_dir):
    """The continuation of the prompt by `infini generate`."""
    sample = config.evaluation.sample.model_copy(update=DRAW)
    model = Model.from_checkpoint(config.updated(evaluation={"sample": sample}), run_dir)
    return "".join(model.stream(PROMPT, seed=SEED))


@pytest.mark.story
def test_a_model_on_a_server_generates_what_the_command_does(made, again, tmp_path):
    """With a trained tokenizer, and of bytes."""
    home = tmp_path / "server"
    home.mkdir()
    with mlflow_server(home) as server:
        config, dataset, run_dir, result = evaluated(
            tmp_path,
            **{
                "data.tokenizer": {"spec": "train", "vocab_size": 280},
                "model.vocab_size": 280,
                "tracking.tracking_uri": server.url,
                "tracking.registered_model": "text",
            },
        )
        log_evaluation(run_dir, dataset, config, result)
        runs = [read_mlflow_record(each) for each in (run_dir, again(tracking_uri=server.url))]
        models = [f"runs:/{run['run_id']}/{name}" for run, name in zip(runs, NAMES, strict=True)]
        library, *texts = load(server.url, *models, "models:/text@best", cwd=tmp_path)
    expected, of_bytes = generated(config, run_dir), generated(made[0], made[2])
    assert len(expected) > 20
    assert texts == [[expected], [of_bytes], [expected]]
    assert "code/infini_model" in library
    stored = {path.suffix for path in (home / "artifacts").rglob("*")}
    assert ".safetensors" in stored
    assert not stored & {".pkl", ".pickle", ".pt", ".bin"}


def test_a_model_is_logged_once_with_its_scores(made, again):
    config, _, _, result = made
    for _ in range(2):
        run_dir = again("run-0.5", registered_model="once")
    (output,) = models_of(run_dir)
    model = client(config.tracking_uri).get_logged_model(output.model_id)
    assert (model.name, model.status, output.step) == ("run-0-5", "READY", 40)
    assert model.params["training.precision"] == "bf16"
    assert {m.key: m.value for m in model.metrics} == result.metrics
    scored_on = {(m.dataset_name, m.dataset_digest) for m in model.metrics}
    assert scored_on == {("corpus", result.dataset_key[:36])}
    assert in_mlflow(run_dir).data.metrics["evaluation/test_loss"] == result.metrics[SCORE]
    assert len(client(config.tracking_uri).search_model_versions("name = 'once'")) == 1


def test_a_second_evaluation_of_a_step_stands_below_the_first(made, again):
    mlflow = client(made[0].tracking_uri)
    for loss in (2.0, 2.0, 3.0):
        run_dir = again("twice", loss=loss, log_model=False)
    run, name = in_mlflow(run_dir), "evaluation/validation_loss"
    history = mlflow.get_metric_history(run.info.run_id, name)
    assert {(metric.step, metric.value) for metric in history} == {(40, 2.0)}
    parent = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    (below,) = mlflow.search_runs([run.info.experiment_id], parent)
    assert (below.data.metrics, below.info.status) == ({name: 3.0}, "FINISHED")
    assert below.data.params["evaluation.tasks"] == "['loss']"
    assert "report.md" in {file.path for file in mlflow.list_artifacts(below.info.run_id)}


def test_the_version_with_the_lowest_loss_is_the_best(made, again):
    best, mlflow = [], client(made[0].tracking_uri)
    for name, loss in (("a", 2.0), ("b", 3.0), ("c", 1.5), ("a", 1.0)):
        again(name, loss=loss, registered_model="ranked")
        best.append(mlflow.get_model_version_by_alias("ranked", "best").version)
    # The last one was registered earlier, with the loss that it had then.
    assert best == [1, 1, 3, 3]


def start(made, run_dir):
    """The record of a training that has not been closed."""
    config = made[0]
    metrics = Record(run_dir, config, DATASET)
    metrics.append(1, {"train/loss": 1.0})
    eventually(
        lambda: "run_id" in read_mlflow_record(run_dir) and in_mlflow(run_dir).data.metrics,
        "the record in MLflow",
    )
    return metrics


@pytest.mark.parametrize(
    ("end", "step", "status"),
    [
        # MLflow was down while it trained; an evaluation creates the record.
        (None, 20, "KILLED"),
        ("FAILED", 20, "FAILED"),
        ("FINISHED", 40, "FINISHED"),
    ],
)
def test_an_evaluation_keeps_the_status_of_a_run(made, again, tmp_path, end, step, status):
    ended = None
    if end is not None:
        start(made, tmp_path / "run").close(end)
        ended = in_mlflow(tmp_path / "run").info.end_time
    run_dir = again(step=step, log_model=end != "FINISHED")
    info = in_mlflow(run_dir).info
    assert info.status == status
    assert ended in (None, info.end_time)
    assert not end_record(run_dir, "FAILED")
    # Models of checkpoints are not logged, nor those of runs with `log_model=false`.
    assert models_of(run_dir) == []
    # The scores are those of the checkpoint, not of the last recorded step.
    history = client(made[0].tracking_uri).get_metric_history(info.run_id, SCORE)
    assert [metric.step for metric in history] == [step]


def test_an_evaluation_leaves_a_running_training_running(made, again, tmp_path):
    metrics = start(made, tmp_path / "run")
    with lock(tmp_path / "run" / "checkpoints" / ".lock"):
        run_dir = again(step=20)
        assert in_mlflow(run_dir).info.status == "RUNNING"
    metrics.close("KILLED")


def test_results_are_kept_when_mlflow_is_down(made, caplog):
    config, dataset, run_dir, result = made
    # Nothing listens on port 9 (discard) of this machine.
    tracking = config.tracking.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    with caplog.at_level(logging.WARNING):
        down = config.model_copy(update={"tracking": tracking})
        log_evaluation(run_dir, dataset, down, result)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(run_dir) in caplog.text
    # The next evaluation delivers it.
    log_evaluation(run_dir, dataset, config, result)
    assert in_mlflow(run_dir).data.metrics[SCORE] == result.metrics[SCORE]
    run_id = in_mlflow(run_dir).info.run_id
    history = client(config.tracking_uri).get_metric_history(run_id, "train/loss")
    assert [metric.step for metric in history] == list(range(41))
    report = client(config.tracking_uri).list_artifacts(run_id)
    assert {"report.md", "report.html", "plots"} <= {file.path for file in report}
