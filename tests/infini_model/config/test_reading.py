"""Settings from files and overrides, also those that an earlier version or command wrote."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.config import dump_config, load_config, merge, validate
from infini_model.config.moved import TASKS, with_keys_moved
from infini_model.config.places import output_place
from infini_model.config.reading import _parse_json
from infini_model.runtime.errors import ConfigError

WEIGHTS = {"initial_weights": "team/llama@main", "segment_length": 64}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.yaml", None, "cannot be read: No such file"),
        ("binary.yaml", b"\xff\xfe\x00", "is not UTF-8"),
        ("list.json", b"[1, 2]", "holds list, needs a mapping"),
        ("torn.json", b'{\n  /* two\n  lines */ "training": {"max_steps": }\n}', ".*line 3"),
        ("open.json", b"{\n\n  /* never closed\n}", ".*line 3"),
        ("torn.yaml", b"# one\ntraining:\n  max_steps: [\n", ".*line 4"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: {message}\b") as caught:
        load_config(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_key_that_a_file_leaves_open_has_to_be_given(tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text('training: {max_steps: "???"}\ndata: {source: {paths: ["???"]}}')
    message = r"^training\.max_steps: missing; give a value: training\.max_steps=VALUE$"
    with pytest.raises(ConfigError, match=message):
        load_config(file)
    config = load_config(file, ["training.max_steps=3"])
    assert config.training.max_steps == 3
    assert config.data.source.paths == ["???"]  # a glob


def test_json_may_have_comments(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(
        """{
    // one line
    "training": {
        "batch_size": 4,  // beside a value
        "max_steps": /* inside */ 7
    },
    /* several
       lines, "quoted" */
    "tracking": {"tracking_uri": "http://host:5000/*/", "experiment_name": "a \\"//\\" b"}
}
// at the end"""
    )
    config = load_config(file)
    assert (config.training.batch_size, config.training.max_steps) == (4, 7)
    assert config.tracking.tracking_uri == "http://host:5000/*/"
    assert config.tracking.experiment_name == 'a "//" b'


@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_json_without_comments_parses_as_json_loads_does(value: object) -> None:
    text = json.dumps({"key": value}, ensure_ascii=False)
    assert _parse_json(text) == json.loads(text)


def test_overrides_beat_the_file_and_the_later_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("training: {max_steps: 2, batch_size: 4}")
    config = load_config(file, ["training.max_steps=3", "training.max_steps=4"])
    assert (config.training.max_steps, config.training.batch_size) == (4, 4)
    # To YAML 1.1 a number without a point is text.
    assert load_config(overrides=["training.learning_rate=1e-5"]).training.learning_rate == 1e-5


def test_reading_the_tree_imports_no_torch() -> None:
    code = "import sys; from infini_model import load_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source={kind: hub, repository: ag_news, column: text}"],
        ["data.source.kind=hub", "data.source.repository=ag_news"],
    ],
    ids=["at once", "key by key"],
)
def test_a_source_of_another_kind_replaces_the_previous_one(overrides: list[str]) -> None:
    hub = load_config(overrides=overrides).data.source
    assert hub.model_dump(exclude_defaults=True) == {"repository": "ag_news"}
    back = [*overrides, "data.source={kind: files, column: body}"]
    files = load_config(overrides=back).data.source
    assert files.model_dump(exclude_defaults=True) == {"column": "body"}
    limited = load_config(overrides=[*overrides, "data.source.limit=5"]).data.source
    assert limited == hub.model_copy(update={"limit": 5})


def test_epochs_and_max_steps_replace_each_other() -> None:
    asked = load_config(overrides=["training.max_steps=9", "training.epochs=2.5"]).training
    assert (asked.epochs, asked.max_steps) == (2.5, None)
    written = load_config(overrides=["training.epochs=2"]).model_dump(mode="json")
    back = load_config(overrides=[written, "training.max_steps=9"]).training
    assert (back.epochs, back.max_steps, back.total_steps) == (None, 9, 9)


def test_initial_weights_replace_the_shape_that_they_are_laid_over(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(overrides=["model.hidden_size=64"])))
    weights = "model.initial_weights=team/llama"
    model = load_config(file, [weights]).model
    assert (model.initial_weights, model.segment_length) == ("team/llama", 128)
    with pytest.raises(ConfigError, match=r"^model\.hidden_size: comes from"):
        load_config(file, [weights, "model.hidden_size=64"])


@pytest.mark.parametrize(
    "beside", [{}, {"memory": "linear"}, {"memory_key_shift": False, "gate_start": -1.0}]
)
def test_what_was_set_beside_initial_weights_survives_yaml_and_json(
    beside: dict[str, object], tmp_path: Path
) -> None:
    config = validate({"model": WEIGHTS | beside})
    yaml, json = tmp_path / "config.yaml", tmp_path / "config.json"
    yaml.write_text(dump_config(config))
    json.write_text(config.model_dump_json())
    for file in (yaml, json):
        again = load_config(file)
        assert again == config
        assert again.identity == config.identity
        assert again.model.beside_initial_weights == {"segment_length": 64} | beside
    assert config.model_dump(mode="json")["model"] == WEIGHTS | beside


def test_head_dim_is_derived_unless_it_is_set(tmp_path: Path) -> None:
    """Also when the other fields are overridden in a tree that was dumped before."""
    file = tmp_path / "config.yaml"
    for override, width in (("model.num_attention_heads=4", 64), ("model.head_dim=16", 16)):
        file.write_text(dump_config(load_config(overrides=[override])))
        assert load_config(file=file, overrides=["model.hidden_size=256"]).model.head_dim == width


def test_the_tokenizer_of_the_model_is_that_of_its_weights() -> None:
    config = validate({"model": WEIGHTS, "data": {"tokenizer": {"spec": "model"}}})
    assert config.data_to_tokenize.tokenizer.spec == "team/llama@main"
    assert load_config().data_to_tokenize == load_config().data


DIFFUSION = {"training": {"objective": "block_diffusion"}}


@pytest.mark.parametrize(
    ("given", "gates"),
    [
        ({}, -2.0),
        (DIFFUSION, 0.0),
        (DIFFUSION | {"model": {"gate_start": -1.0}}, -1.0),
        (DIFFUSION | {"model": WEIGHTS}, -2.0),
    ],
)
def test_gates_start_open_where_only_the_memory_shows_what_came_before(
    given: dict[str, Any], gates: float
) -> None:
    assert load_config(overrides=[given]).model.gate_start == gates


@pytest.mark.parametrize("output_dir", ["s3://bucket/team", "here", None])
def test_another_process_is_told_the_same_output_folder_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    chosen = [] if output_dir is None else [{"run": {"output_dir": output_dir}}]
    run = load_config(overrides=chosen).run
    monkeypatch.setenv("INFINI_OUTPUT_DIR", output_place(run.output_dir, run.store))
    told = load_config(overrides=[{"run": {"seed": 1}}]).run
    assert told.store == run.store
    assert told.output_dir.resolve() == run.output_dir.resolve()


@pytest.mark.parametrize("section", ["logging", "training"])
def test_a_limit_that_an_earlier_version_counted_in_batches_is_counted_in_windows(
    section: str,
) -> None:
    tree: dict[str, Any] = {"evaluation": {"max_batches": 9}, "training": {"batch_size": 4}}
    tree = merge(tree, {section: {"eval_batches": 3}, "launch": {"processes": 2}})
    before = copy.deepcopy(tree)
    moved = with_keys_moved(tree)
    assert moved["evaluation"] == {"max_windows": 24}
    assert "eval_batches" not in moved.get(section, {})
    assert tree == before
    assert with_keys_moved({"evaluation": {"max_batches": None}}) == {"evaluation": {}}


def test_a_task_of_an_earlier_version_is_measured_under_its_new_name() -> None:
    moved = with_keys_moved({"evaluation": {"tasks": ["sample", *TASKS]}})
    assert moved == {"evaluation": {"tasks": ["sample", *TASKS.values()]}}
