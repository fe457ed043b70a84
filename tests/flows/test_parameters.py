"""The parameters of a deployed flow: the form, what it refuses, and the `Config` that it means."""

import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from flows.parameters import invoked, settings_of
from flows.presets import configure, preset_names
from infini_model.config import Config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import ConfigError, DeviceError, UserError
from tasks.checks import check_gpus_of_evaluation

FLOWS = ("pipeline", "preprocess", "train", "evaluate", "compare")
WEIGHTS = "model.initial_weights=team/llama"


def resolve(*given: Any, **named: Any) -> Config:
    """The configuration that a flow's parameters mean."""
    return invoked(*given, **named).config


def flow_called(name: str) -> Flow[..., Any]:
    found: Flow[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found


@functools.cache
def schema_of(name: str) -> dict[str, Any]:
    """The schema of a flow's deployment, as `prefect deploy` makes it."""
    return dict(parameter_schema(flow_called(name)).model_dump_for_openapi())


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
    assert fields["preset"]["enum"] == list(preset_names())
    defaults = {key: field["default"] for key, field in fields.items() if "default" in field}
    # A run is evaluated with its own settings, unless a preset is chosen.
    assert defaults == ({} if name == "evaluate" else {"preset": "quickstart"})
    # One box of JSON.
    assert "properties" not in fields["advanced"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"preset": "quickest"}, ["'preset'", "'quickest' is not one of", "quickstart"]),
        ({"steps": 0}, ["'steps'", "0 is less than the minimum of 1"]),
        ({"seed": 2**64}, ["'seed'", "maximum of 4294967295"]),
        ({"advanced": {"training": {"max_stepz": 1}}}, ["advanced.training", "max_stepz"]),
        ({"advanced": {"model": {"memory": "big"}}}, ["advanced.model.memory", "'big'"]),
        ({"advanced": {"run": {"preset": "debug"}}}, ["advanced.run", "'preset'"]),
    ],
)
def test_the_form_takes_a_part_and_names_a_wrong_value(
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


def test_what_prefect_stores_wrapped_is_what_was_typed() -> None:
    def wrapped(*value: str) -> dict[str, Any]:
        return dict(zip(("__prefect_kind", "value"), ("json", *value), strict=False))

    assert resolve("debug", wrapped()) == configure(["debug"])
    stable = configure(["debug", "stable"])
    assert resolve(["debug", "stable"]) == resolve(wrapped('["debug", "stable"]')) == stable
    section = {"training": wrapped('{"warmup_steps": 3}'), "run": {"seed": wrapped("7")}}
    assert resolve(
        wrapped('"debug"'), section, steps=wrapped("9"), documents=[wrapped('"a.txt"')]
    ) == resolve(
        "debug", {"training": {"warmup_steps": 3}, "run": {"seed": 7}}, steps=9, documents=["a.txt"]
    )
    assert resolve("debug", wrapped('{"run": {"seed": 7}}')).run.seed == 7
    sources = {"web": {"paths": ["a.txt"]}, "code": {"repository": "team/code"}}
    weighed = {"web": 1, "code": [0.5]}
    mixed = resolve(
        "arxiv", sources=wrapped(json.dumps(sources)), source_weights=wrapped(json.dumps(weighed))
    )
    validate(
        {"sources": sources, "source_weights": weighed}, schema_of("pipeline"), raise_on_error=True
    )
    assert [(name, each.kind) for name, each in mixed.data.named_sources.items()] == [
        ("code", "hub"),
        ("web", "files"),
    ]
    assert mixed.packing.weights_in(0) == {"web": 1.0, "code": 0.5}
    assert mixed.data.source is None
    assert mixed.data.name.startswith("code-web-")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"context_length": 100}, ["context_length", "segment_length"]),
        ({"documents": ["a.txt"], "dataset": "here"}, ["Documents", "Dataset"]),
        ({"documents": ["a.txt"], "sources": {"a": {"paths": ["b"]}}}, ["Documents", "Sources"]),
        (
            {"sources": {"a": {"path": "b"}}},
            ["data.sources.a.path: ", "mean data.sources.a.paths?"],
        ),
        ({"sources": {"a": {"paths": ["b"]}}, "source_weights": {"b": 1}}, ["packing.weights.b: "]),
        ({"name": "a", "resume": "b"}, ["Name", "Resume"]),
        ({"resume": "nowhere"}, ["/runs/nowhere: there is no such run"]),
        ({"branch_of": "a", "resume": "b"}, ["Branch of", "Resume"]),
        ({"branch_of": "nowhere@3"}, ["/runs/nowhere: there is no such run"]),
        ({"branch_of": "a@b"}, ["training.branch_of: got 'a@b': takes RUN or RUN@STEP"]),
        ({"advanced": {"run": 5}}, ["run", "5"]),
        (
            {"steps": 60, "advanced": {"training": {"max_steps": 5}}},
            ["training.max_steps", "twice"],
        ),
        ({"advanced": "training"}, ["Advanced", "training"]),
        # The form does not check them: it would show a regular expression.
        ({"devices": "gpu7"}, ["launch.gpus: got 'gpu7': takes auto, all, cpu, or device numbers"]),
        ({"resume": "../elsewhere"}, ["run.name: got '../elsewhere': takes letters and digits"]),
        ({"advanced": {"__prefect_kind": "json", "value": "{"}}, ["Advanced", "'{'"]),
    ],
)
def test_what_does_not_go_together_is_one_line(
    parameters: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", str(tmp_path))
    with pytest.raises(UserError) as caught:
        resolve(**parameters)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_resumed_run_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_branch_has_the_settings_of_its_parent_but_for_those_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", str(tmp_path))
    begun = configure(["debug"], overrides=["run.name=mine", "training.max_steps=77"])
    with claim_run(begun, "key", tmp_path / "datasets" / "some-key"):
        pass
    constant = {"training": {"schedule": "constant"}}
    branch = resolve("quickstart", constant, branch_of="latest@50", steps=99)
    changed = {"max_steps": 99, "schedule": "constant", "branch_of": "mine@50"}
    assert branch.training == begun.training.updated(**changed)
    assert branch.data.folder == tmp_path / "datasets" / "some-key"
    assert (branch.model, branch.run.name) == (begun.model, None)
    # Documents take the place of its dataset, under the name that pins its tokenizer.
    other = resolve("quickstart", branch_of="mine", steps=99, documents=["/texts/*.txt"])
    assert (other.data.folder, other.data.name) == (None, begun.data.name)
    with pytest.raises(
        ConfigError, match=r"has the model and the optimizer of its parent \(model\.memory is 'res"
    ):
        resolve("quickstart", {"model": {"memory": "none"}}, branch_of="mine")


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        *((preset, ()) for preset in (*preset_names(), None)),
        ("arxiv", ("data.source={kind: files, paths: [a.jsonl]}", "training.epochs=2.5")),
        ("debug", ("model.head_dim=16", "evaluation.sample.top_k=null", "run.seed=3")),
        # What is set beside initial weights counts even where it is the default.
        (
            "uptrain",
            ("model.segment_length=128", "model.memory=linear", "model.read_weight_start=-2.0"),
        ),
    ],
)
def test_settings_handed_on_whole_are_the_same(
    preset: str | None, overrides: Sequence[str]
) -> None:
    if preset is not None and preset.startswith(("uptrain", "fine-tune")):
        overrides = [WEIGHTS, *overrides]
    config = configure([] if preset is None else [preset], overrides=overrides)
    whole = config.model_dump(mode="json")
    resolved = resolve(preset=None, advanced=json.loads(json.dumps(whole)))
    assert resolved == config
    # The width of a head is written down only where it was asked for.
    assert resolved.model_dump_json() == config.model_dump_json()


def test_a_machine_that_only_evaluates_needs_the_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_ray = configure(["debug"], overrides=["launch.launcher=ray", "launch.gpus=all"])
    refusal = (
        r"^launch\.gpus=all: no GPU on this machine, where the run is evaluated; set "
        r"launch\.gpus=auto$"
    )
    with pytest.raises(DeviceError, match=refusal):
        check_gpus_of_evaluation(on_ray)
