"""What a deployed flow is asked for: the form, what it refuses, and the `Config` that it means.

Also what a stage on another machine is started with, which are such parameters.
"""

import functools
import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from flows.elsewhere import check_elsewhere, parameters_elsewhere
from flows.parameters import parameters_of, resolve, settings_of
from flows.presets import configure, preset_choices
from infini_model.config import Config, FlowStageConfig
from infini_model.config.places import working_folder
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError, UserError

FLOWS = ("pipeline", "preprocess", "train", "evaluate", "compare")
WEIGHTS = "model.initial_weights=team/llama"


def flow_called(name: str) -> Flow[..., Any]:
    found: Flow[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found


@functools.cache
def schema_of(name: str) -> dict[str, Any]:
    """The schema of a flow's deployment, as `prefect deploy` makes it."""
    return dict(parameter_schema(flow_called(name)).model_dump_for_openapi())


def parsed(config: Config, name: str) -> Config:
    """What a flow makes of the parameters for a configuration once they have been sent to it."""
    flow = flow_called(name)
    parameters = json.loads(json.dumps(parameters_of(config, flow)))
    inspect.signature(flow.fn).bind(**parameters)
    return resolve(**parameters)


@pytest.mark.parametrize("name", FLOWS)
def test_the_form_has_a_plain_input_for_each_setting_of_the_flow(name: str) -> None:
    schema = schema_of(name)
    fields = schema["properties"]
    assert list(fields) == ["preset", *settings_of(name), "advanced"]
    assert "required" not in schema
    for field in fields.values():
        assert field["description"].endswith(".")
        # Neither a choice of types nor a default of null.
        assert field["type"] in ("string", "integer", "number", "boolean", "array", "object")
        assert "anyOf" not in field
    assert fields["preset"]["enum"] == preset_choices()
    assert {key: field["default"] for key, field in fields.items() if "default" in field} == {
        "preset": "quickstart"
    }
    # One box of JSON.
    assert "properties" not in fields["advanced"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"preset": "quickest"}, ["'preset'", "'quickest' is not one of", "quickstart"]),
        ({"steps": 0}, ["'steps'", "0 is less than the minimum of 1"]),
        ({"devices": "gpu7"}, ["'devices'", "does not match"]),
        ({"resume": "../elsewhere"}, ["'resume'", "does not match"]),
        ({"advanced": {"training": {"max_stepz": 1}}}, ["advanced.training", "max_stepz"]),
        ({"advanced": {"model": {"memory": "big"}}}, ["advanced.model.memory", "'big'"]),
        ({"advanced": {"run": {"preset": "debug"}}}, ["advanced.run", "'preset'"]),
    ],
)
def test_the_form_takes_a_part_of_the_settings_and_names_a_wrong_value(
    parameters: dict[str, Any], words: list[str]
) -> None:
    taken = {"learning_rate": None, "advanced": {"data": {"source": {"limit": 5}, "folder": None}}}
    validate(taken | {"preset": "debug", "devices": "0,3"}, schema_of("train"), raise_on_error=True)
    with pytest.raises(ValidationError) as caught:
        validate(parameters, schema_of("train"), raise_on_error=True)
    for word in words:
        assert word in str(caught.value)


def test_documents_replace_a_source_of_another_kind() -> None:
    given = resolve("arxiv", {"training": {"max_steps": 10}}, steps=10, documents=["/texts/*.txt"])
    source = "data.source={kind: files, paths: [/texts/*.txt]}"
    assert given == configure(["arxiv"], overrides=[source, "training.max_steps=10"])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"context_length": 100}, ["context_length", "segment_length"]),
        ({"documents": ["a.txt"], "dataset": "here"}, ["documents", "dataset"]),
        ({"name": "a", "resume": "b"}, ["name", "resume"]),
        ({"resume": "nowhere"}, ["resume", "nowhere"]),
        ({"advanced": {"run": 5}}, ["run", "5"]),
        (
            {"steps": 60, "advanced": {"training": {"max_steps": 5}}},
            ["training.max_steps", "twice"],
        ),
        ({"advanced": "training"}, ["advanced", "training"]),
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


def test_a_resumed_run_keeps_its_own_settings_and_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", str(tmp_path))
    begun = configure(["debug"], overrides=["run.name=mine", "training.max_steps=77"])
    with claim_run(begun, "key", tmp_path / "datasets" / "some-key"):
        pass
    often = {"checkpoint": {"save_steps": 3}}
    resumed = resolve("quickstart", often, resume="latest", devices="cpu")
    assert resumed.data.folder == tmp_path / "datasets" / "some-key"
    assert resumed.checkpoint == begun.checkpoint.model_copy(update={"save_steps": 3})
    assert resumed.launch == begun.launch.model_copy(update={"gpus": "cpu"})
    assert resumed.training == begun.training
    assert (resumed.run, resumed.model) == (begun.run, begun.model)


OVERRIDES: tuple[Sequence[str], ...] = (
    (
        *("training.max_steps=10", "training.learning_rate=3.3e-4", "training.batch_size=3"),
        *("run.seed=3", "run.name=mine", "data.tokenizer.spec=train", "data.name=texts"),
    ),
    ("model.hidden_size=256", "model.head_dim=16", "packing.context_length=4096"),
    ("data.source={kind: hub, repository: ag_news, column: text, limit: 10000}",),
    ('data.source={kind: files, paths: ["/texts/*.txt"], separator: "\\n\\n"}',),
    # Of another kind than arxiv's, with a field in common.
    ("data.source={kind: files, paths: [a.jsonl], column: article}", "training.epochs=2.5"),
    ("data.folder=here", "run.output_dir=elsewhere", "logging.tensorboard_dir=/boards"),
    ("evaluation.sample.top_k=null", "evaluation.max_windows=null", "launch.gpus=0"),
    ("comparison={runs: [a, b], sweep: ['model.memory=linear,none', 'run.seed=0,1']}",),
    # As in a file that was written after a preset: the weights that it needs are not there.
    ("run.preset=uptrain",),
    (
        "model.rope_scaling={factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
        "original_max_position_embeddings: 8192}",
    ),
)
# What is set beside initial weights counts even where it is the default: a Llama's folder may have
# other values.
BESIDE = ("model.segment_length=128", "model.memory=linear", "model.gate_start=-2.0")


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        *((preset, ()) for preset in preset_choices()),
        *((preset, each) for preset in (None, "arxiv+stable") for each in OVERRIDES),
        *((preset, (WEIGHTS, *BESIDE)) for preset in (None, "uptrain")),
        *((preset, (WEIGHTS, BESIDE[0])) for preset in (None, "uptrain")),
    ],
)
def test_a_flow_resolves_to_what_the_command_line_checked(
    preset: str | None, overrides: Sequence[str]
) -> None:
    if preset is not None and preset.startswith(("uptrain", "fine-tune")):
        overrides = [WEIGHTS, *overrides]
    config = configure([] if preset is None else [preset], overrides=overrides)
    for name in FLOWS:
        resolved = parsed(config, name)
        assert resolved == config
        # The width of a head is written down only where it was asked for.
        assert resolved.model_dump_json() == config.model_dump_json()


def test_parameters_are_what_was_asked_for_and_no_more() -> None:
    config = configure(["debug"], overrides=["training.max_steps=11", "training.warmup_steps=1"])
    advanced = {"training": {"warmup_steps": 1}}
    expected = {"preset": "debug", "steps": 11, "advanced": advanced}
    assert parameters_of(config, flow_called("train")) == expected


ELSEWHERE = tuple(f"stages.{stage}.deployment=there" for stage in ("shard", "train", "evaluate"))


def config_of(*overrides: str) -> Config:
    return configure(["debug"], overrides=[*ELSEWHERE, "stages.train.retries=7", *overrides])


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_stage_elsewhere_has_the_same_settings_and_no_stage_that_is_elsewhere_again(
    name: str,
) -> None:
    places = ("run.output_dir=/shared", "run.data_dir=/datasets")
    config = config_of("training.max_steps=9", "run.seed=3", "data.keep=2", *places)
    parameters = parameters_elsewhere(config, name, folder=Path("/shared/datasets/a-1"))
    # All of them: what is null here is not to be the deployment's own.
    assert parameters.keys() == {"preset", *settings_of(name), "advanced"}
    there = resolve(**parameters)
    data = config.data.model_copy(update={"folder": Path("/shared/datasets/a-1"), "keep": None})
    assert there == config.model_copy(update={"data": data, "stages": config.stages.in_place})
    assert there.deployments == {}
    assert there.stages.train == FlowStageConfig(retries=7)
    # A dataset that is given leaves nothing to shard.
    assert config_of("data.folder=a-1").deployments == {"train": "there", "evaluate": "there"}


def test_a_machine_with_another_cache_has_the_same_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", "/here")
    parameters = parameters_elsewhere(config_of("run.output_dir=s3://bucket/team"), "shard")
    monkeypatch.setenv("INFINI_CACHE_DIR", "/there")
    there = resolve(**parameters).run
    assert there.output_dir == working_folder("s3://bucket/team")
    assert there.store == "s3://bucket/team"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["launch.num_nodes=2", "launch.rdzv_endpoint=head:29500", "run.name=one", *ELSEWHERE],
            r"^stages\.shard\.deployment: is not for launch\.num_nodes over 1",
        ),
        (["data.share=1/2", *ELSEWHERE], r"^data\.share: is not for stages\.shard\.deployment"),
        # A machine that only evaluates needs the GPUs, too.
        (
            ["launch.launcher=ray", "launch.gpus=all"],
            r"^launch\.gpus=all: no GPU on this machine, where the run is evaluated; name a "
            r"stages\.evaluate\.deployment, or set launch\.gpus=auto$",
        ),
    ],
)
def test_what_cannot_be_elsewhere_is_refused(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=message):
        check_elsewhere(configure(["debug"], overrides=overrides))
