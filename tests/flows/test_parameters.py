"""What a deployed flow is asked for: the form, what it refuses, and the `Config` that it means."""

import importlib
import inspect
import json
import sys
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Environment, api, run
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from flows.parameters import SETTINGS, parameters_of, resolve, settings_of
from flows.presets import configure, preset_choices
from flows.serving.services import PROJECT
from infini_model.config import Config, load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError

FLOWS = ("pipeline", "preprocess", "train", "evaluate", "compare")


def flow_called(name: str) -> Flow[..., Any]:
    found: Flow[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found


def schema_of(name: str) -> dict[str, Any]:
    """The schema of a flow's deployment, as `prefect deploy` makes it."""
    return dict(parameter_schema(flow_called(name)).model_dump_for_openapi())


@pytest.mark.parametrize("name", FLOWS)
def test_the_form_is_short_and_each_field_says_what_it_takes(name: str) -> None:
    schema = schema_of(name)
    fields = schema["properties"]
    assert len(fields) <= 14
    assert next(iter(fields)) == "preset"
    assert list(fields)[-1] == "advanced"
    assert "required" not in schema
    for key, field in fields.items():
        assert field["title"] == key.replace("_", " ").capitalize()
        assert field["description"].endswith(".")
        # One plain input: neither a choice of types nor a default of null.
        assert field["type"] in ("string", "integer", "number", "boolean", "array", "object")
        assert "anyOf" not in field
    assert fields["preset"]["enum"] == preset_choices()
    assert {key: field["default"] for key, field in fields.items() if "default" in field} == {
        "preset": "quickstart"
    }
    # One box of JSON.
    assert "properties" not in fields["advanced"]


@pytest.mark.parametrize("name", FLOWS)
def test_each_flow_takes_the_settings_that_name_it(name: str) -> None:
    expected = ["preset", *settings_of(name), "advanced"]
    flow = flow_called(name)
    assert list(inspect.signature(flow.fn).parameters) == expected
    assert list(schema_of(name)["properties"]) == expected


def test_every_setting_names_flows_and_the_pipeline_takes_what_training_does() -> None:
    for setting in SETTINGS.values():
        assert setting.flows
        assert set(setting.flows) <= set(FLOWS)
    assert settings_of("pipeline") == ["documents", *settings_of("train")]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"preset": "debug", "steps": 10, "learning_rate": 3e-4, "devices": "0,3", "seed": 0},
        {"steps": None, "devices": None, "advanced": None},
        {"advanced": {"training": {"warmup_steps": 0}}},
        {"advanced": {"data": {"source": {"limit": 5}, "folder": None}}},
    ],
)
def test_the_form_takes_a_part_of_the_settings(parameters: dict[str, Any]) -> None:
    validate(parameters, schema_of("train"), raise_on_error=True)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"preset": "quickest"}, ["'preset'", "'quickest' is not one of", "quickstart"]),
        ({"steps": 0}, ["'steps'", "0 is less than the minimum of 1"]),
        ({"steps": "many"}, ["'steps'", "'many' is not valid"]),
        ({"learning_rate": 0}, ["'learning_rate'", "minimum of 0"]),
        ({"devices": "gpu7"}, ["'devices'", "does not match"]),
        ({"resume": "../elsewhere"}, ["'resume'", "does not match"]),
        ({"advanced": {"training": {"max_stepz": 1}}}, ["advanced.training", "max_stepz"]),
        ({"advanced": {"model": {"memory": "big"}}}, ["advanced.model.memory", "'big'"]),
        ({"advanced": {"run": {"preset": "debug"}}}, ["advanced.run", "'preset'"]),
    ],
)
def test_prefect_refuses_a_wrong_value_and_names_it(
    parameters: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        validate(parameters, schema_of("train"), raise_on_error=True)
    for word in words:
        assert word in str(caught.value)


def test_the_form_of_evaluate_takes_known_tasks_only() -> None:
    schema = schema_of("evaluate")
    validate({"tasks": ["sample", "loss"]}, schema, raise_on_error=True)
    with pytest.raises(ValidationError, match="'heat' is not one of"):
        validate({"tasks": ["heat"]}, schema, raise_on_error=True)
    assert resolve(tasks=["sample"]).evaluation.tasks == ["sample"]


def test_what_is_not_given_is_the_presets() -> None:
    asked = resolve("shakespeare", {"training": {"warmup_steps": 7}}, steps=10)
    expected = configure(
        ["shakespeare"], overrides=["training.warmup_steps=7", "training.max_steps=10"]
    )
    assert asked == expected
    assert resolve() == configure(["quickstart"])


def test_the_remedy_is_chosen_beside_a_preset_or_alone() -> None:
    assert resolve("arxiv+stable") == configure(["arxiv", "stable"])
    assert resolve("stable") == configure(["quickstart", "stable"])


def test_the_remedy_over_a_file_reaches_the_flow(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("training: {max_steps: 3}")
    config = configure(["stable"], file)
    assert resolve(**parameters_of(config, flow_called("train"))) == config


def test_a_named_setting_beats_advanced() -> None:
    assert resolve(advanced={"training": {"max_steps": 5}}, steps=10).training.max_steps == 10


def test_documents_take_the_place_of_a_source_of_another_kind() -> None:
    source = resolve("arxiv", documents=["/texts/*.txt"]).data.source
    assert source == load_config(
        overrides=[{"data": {"source": {"paths": ["/texts/*.txt"]}}}]
    ).data.source.model_copy(update={"errors": "fail"})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"context_length": 100}, ["context_length", "segment_length"]),
        ({"documents": ["a.txt"], "dataset": "here"}, ["documents", "dataset"]),
        ({"name": "a", "resume": "b"}, ["name", "resume"]),
        ({"resume": "nowhere"}, ["resume", "nowhere"]),
        ({"steps": "many"}, ["training.max_steps", "many"]),
        ({"advanced": "training"}, ["advanced", "training"]),
        ({"advanced": {"run": {"preset": "debug"}}}, ["preset"]),
        ({"preset": "quickest"}, ["quickest", "quickstart"]),
        ({"preset": "uptrain"}, ["model.initial_weights: missing; the preset uptrain needs"]),
        ({"preset": "uptrain+stable", "steps": 3}, ["model.initial_weights: missing"]),
    ],
)
def test_what_does_not_go_together_is_one_line(
    parameters: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        resolve(**parameters)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("wanted", ["mine", "latest"])
def test_a_resumed_run_keeps_its_own_settings_and_dataset(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", str(tmp_path))
    begun = configure(["debug"], overrides=["run.name=mine", "training.max_steps=77"])
    with claim_run(begun, "key", tmp_path / "datasets" / "some-key"):
        pass
    resumed = resolve("quickstart", {"checkpoint": {"save_steps": 3}}, resume=wanted, devices="cpu")
    assert resumed.data.folder == tmp_path / "datasets" / "some-key"
    assert resumed.checkpoint == begun.checkpoint.model_copy(update={"save_steps": 3})
    assert resumed.launch == begun.launch.model_copy(update={"gpus": "cpu"})
    assert resumed.training == begun.training
    assert (resumed.run, resumed.model) == (begun.run, begun.model)


OVERRIDES: tuple[Sequence[str], ...] = (
    (),
    ("training.max_steps=10", "training.learning_rate=3.3e-4", "run.seed=3", "run.name=mine"),
    ("model.hidden_size=256", "model.intermediate_size=512"),
    ("model.hidden_size=256", "model.head_dim=16", "packing.context_length=4096"),
    ("data.source={kind: hub, repository: ag_news, column: text, limit: 10000}",),
    ('data.source={kind: files, paths: ["/texts/*.txt"], separator: "\\n\\n"}',),
    ("data.folder=here", "run.output_dir=elsewhere", "logging.tensorboard_dir=/boards"),
    ("evaluation.sample.top_k=null", "evaluation.max_windows=null", "launch.gpus=0"),
    ("training.epochs=2.5",),
    ("run.preset=debug",),
    ("comparison={runs: [a, b], sweep: ['model.memory=linear,none', 'run.seed=0,1']}",),
    ("run.preset=mine",),
    ("data.tokenizer.spec=train", "data.name=texts", "training.batch_size=3"),
    (
        "model.rope_scaling={factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
        "original_max_position_embeddings: 8192}",
    ),
)


@pytest.mark.parametrize("preset", [None, *preset_choices()])
@pytest.mark.parametrize("overrides", OVERRIDES)
def test_a_flow_resolves_to_what_the_command_line_checked(
    preset: str | None, overrides: Sequence[str]
) -> None:
    if preset is not None and preset.startswith(("uptrain", "fine-tune", "llada")):
        # Their weights replace the shape: what some of the overrides set has no meaning beside it.
        overrides = [*overrides, "model.initial_weights=team/llama"]
    config = configure([] if preset is None else [preset], overrides=overrides)
    for name in FLOWS:
        flow = flow_called(name)
        parameters = json.loads(json.dumps(parameters_of(config, flow)))
        inspect.signature(flow.fn).bind(**parameters)
        resolved = resolve(**parameters)
        assert resolved == config
        # The width of a head is written down only where it was asked for.
        assert resolved.model_dump_json() == config.model_dump_json()


@pytest.mark.parametrize("preset", [None, "quickstart", "arxiv", "uptrain"])
@pytest.mark.parametrize("beside", [[], ["model.memory=linear", "model.gate_start=-2.0"]])
def test_what_is_set_beside_initial_weights_reaches_the_flow(
    preset: str | None, beside: list[str]
) -> None:
    """Also where it is the default: a Llama's folder may have other values."""
    weights = ["model.initial_weights=team/llama", "model.segment_length=128", *beside]
    config = configure([] if preset is None else [preset], overrides=weights)
    again = resolve(**json.loads(json.dumps(parameters_of(config, flow_called("train")))))
    assert again == config
    assert again.model.beside_initial_weights == config.model.beside_initial_weights


def test_a_preset_that_needs_weights_takes_them_from_the_form() -> None:
    asked = resolve("uptrain", initial_weights="team/llama", steps=10)
    weights = ["model.initial_weights=team/llama", "training.max_steps=10"]
    assert asked == configure(["uptrain"], overrides=weights)
    assert parameters_of(asked, flow_called("pipeline")) == {
        "preset": "uptrain",
        "initial_weights": "team/llama",
        "steps": 10,
        "advanced": {"model": {"segment_length": 2048}},
    }


def test_settings_without_the_weights_that_their_preset_needs_reach_the_flow() -> None:
    """As those of a file may be that was written after a preset."""
    config = load_config(overrides=["run.preset=uptrain"])
    assert resolve(**parameters_of(config, flow_called("train"))) == config


def test_parameters_are_what_was_asked_for_and_no_more() -> None:
    overrides = ["training.max_steps=11", "training.warmup_steps=1"]
    config = configure(["debug"], overrides=overrides)
    assert parameters_of(config, flow_called("train")) == {
        "preset": "debug",
        "steps": 11,
        "advanced": {"training": {"warmup_steps": 1}},
    }
    assert parameters_of(Config(), flow_called("train")) == {"preset": None, "advanced": None}


def test_a_deployment_refuses_a_wrong_value_and_a_run_says_in_one_line_what_does_not_fit(
    server: str, connected: Environment
) -> None:
    flow = api(server, "flows/", name="train")["id"]
    enter = {"prefect.deployments.steps.set_working_directory": {"directory": str(PROJECT)}}
    deployment = api(
        server,
        "deployments/",
        name="form",
        flow_id=flow,
        pull_steps=[enter],
        entrypoint="flows/train.py:train",
        parameters={"preset": "debug"},
        parameter_openapi_schema=schema_of("train"),
        enforce_parameter_schema=True,
    )["id"]
    path = f"deployments/{deployment}/create_flow_run"
    with pytest.raises(urllib.error.HTTPError) as refused:
        api(server, path, parameters={"steps": "many"})
    assert refused.value.code == 409
    assert "'steps'" in refused.value.read().decode()

    number = api(server, path, parameters={"context_length": 100})["id"]
    engine = [sys.executable, "-m", "prefect.engine", number]
    ended = run(engine, connected | {"PYTHONPATH": str(PROJECT)}, cwd=PROJECT)
    found = api(server, f"flow_runs/{number}", "GET")
    assert found["parameters"] == {"preset": "debug", "context_length": 100}
    assert found["state_type"] == "FAILED", ended.stderr
    (line,) = found["state"]["message"].splitlines()
    assert line.endswith("packing.context_length 100 is not a multiple of model.segment_length 32")
