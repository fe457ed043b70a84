"""The configuration tree: what it accepts comes back equal, what it refuses is named."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import (
    Config,
    dump_config,
    load_config,
    merge,
    parse_override,
)
from infini_model.config.explaining import all_keys
from infini_model.config.moved import MOVED, with_keys_moved
from infini_model.config.names import NAMES
from infini_model.config.reading import _parse_json
from infini_model.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("training.max_stepz=3", ["training.max_stepz", "unknown key"]),
        ("trainning.max_steps=3", ["trainning", "unknown key"]),
        ("training.max_steps=many", ["training.max_steps", "'many'", "integer"]),
        ("training.max_steps=0", ["training.max_steps", "0", "greater than 0"]),
        ("training.adam_beta1=1.0", ["training.adam_beta1", "less than 1"]),
        ("training.learning_rate=.nan", ["training.learning_rate", "finite"]),
        ("launch.gpus=first", ["launch.gpus", "'first'", "auto, all, cpu"]),
        ("data.device=gpu", ["data.device", "'gpu'", "cuda:N"]),
        ("data.source.kind=zip", ["data.source.kind", "'zip'", "'files', 'hub'"]),
        ("data.source.pathz=[a]", ["data.source.pathz", "unknown key"]),
        ("data.source={kind: hub}", ["data.source.repository", "missing"]),
        ("data.splits.train=0.5", ["data.splits", "must be 1, not 0.6"]),
        ("data.name=../elsewhere", ["data.name"]),
        ("run.name=a/b", ["run.name"]),
        ("model.num_attention_heads=3", ["model", "hidden_size 128", "num_attention_heads 3"]),
        ("model.num_key_value_heads=3", ["model", "num_key_value_heads 3"]),
        ("model.head_dim=5", ["model", "head_dim must be even", "not 5"]),
        ("model.rope_scaling.factor=8", ["model.rope_scaling.low_freq_factor", "missing"]),
        ("model.rope_scaling={rope_type: yarn}", ["model.rope_scaling.rope_type", "'llama3'"]),
        ("packing.context_length=100", ["packing.context_length 100", "model.segment_length 128"]),
        ("launch.num_nodes=2", ["launch", "rdzv_endpoint"]),
        (
            "launch={num_nodes: 2, rdzv_endpoint: 'first:29500'}",
            ["launch.num_nodes over 1 needs run.name"],
        ),
        ("training", ["'training'", "section.key=value"]),
        ("training.max_steps=[", ["training.max_steps", "YAML"]),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_key(override: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(file=tmp_path / "nowhere.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: is not UTF-8"):
        load_config(file=binary)
    listing = tmp_path / "list.json"
    listing.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list\.json: holds list, needs a mapping"):
        load_config(file=listing)
    torn = tmp_path / "torn.json"
    torn.write_text('{"training": {')
    with pytest.raises(ConfigError, match=r"torn\.json") as caught:
        load_config(file=torn)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("training.max_stepz=3", "did you mean training.max_steps?"),
        ("trainning.max_steps=3", "did you mean training?"),
        ("data.source.pathz=[a]", "did you mean data.source.paths?"),
        ("model.learning_rats=1", "did you mean training.learning_rate?"),
        ("training.context_length=64", "it is packing.context_length"),
        ("batch_size=4", "it is data.batch_size, training.batch_size or evaluation.batch_size"),
        ("training.grad_accum_nums=8", "it is training.gradient_accumulation_steps"),
        ("training.init_std=0.01", "it is model.initializer_range"),
        ("training.num_workers=8", "data.workers"),
        ("training.use_amp=false", "training.precision"),
        ("epochs=3", "it is training.epochs"),
        ("system.device=cuda", "launch.gpus"),
        ("system={device_id: 3}", "it is launch.gpus"),
        ("data.source.limit=5", "unknown key for this kind of source"),
    ],
)
def test_an_unknown_key_says_what_may_be_meant(override: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    assert str(caught.value).endswith(meant) or meant in str(caught.value).partition("; ")[2]


def test_what_resembles_nothing_is_unknown_and_no_more() -> None:
    for override in ("training.zzzz=1", "zzzz={}", "system={}"):
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key}: unknown key$"):
            load_config(overrides=[override])


def test_every_foreign_name_leads_to_keys_that_exist_and_is_none_itself() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    sections = {key.rpartition(".")[0] for key in all_keys()}
    for name, meant in NAMES.items():
        assert name not in {*all_keys(), *leaves}
        named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", meant)
        assert named, f"{name} leads to no key"
        for key in named:
            assert key in {*all_keys(), *sections}, f"{name} leads to {key}, which does not exist"


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torn.json", '{\n  /* two\n  lines */ "training": {"max_steps": }\n}'),
        ("open.json", "{\n\n  /* never closed\n}"),
        ("torn.yaml", "# one\ntraining:\n  max_steps: [\n"),
    ],
)
def test_a_file_that_is_torn_is_named_with_the_line(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: .*line [34]\b") as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_json_without_comments_is_read_as_ever(value: object) -> None:
    text = json.dumps({"key": value}, ensure_ascii=False)
    assert _parse_json(text) == json.loads(text)


def test_later_overrides_win_and_yaml_and_json_agree(tmp_path: Path) -> None:
    config = load_config(overrides=["training.max_steps=3", "training.max_steps=4"])
    assert config.training.max_steps == 4
    assert load_config(overrides=["training.learning_rate=1e-5"]).training.learning_rate == 1e-5
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert load_config(file=file) == config


def test_epochs_and_max_steps_take_each_others_place() -> None:
    asked = load_config(overrides=["training.max_steps=9", "training.epochs=2.5"]).training
    assert (asked.epochs, asked.max_steps) == (2.5, None)
    with pytest.raises(ValueError, match="known when the training starts"):
        _ = asked.total_steps
    written = load_config(overrides=["training.epochs=2"]).model_dump(mode="json")
    back = load_config(overrides=[written, "training.max_steps=9"]).training
    assert (back.epochs, back.max_steps, back.total_steps) == (None, 9, 9)
    for both in ("training={epochs: 2, max_steps: 9}", "training.max_steps=null"):
        with pytest.raises(ConfigError, match=r"^training: takes max_steps or epochs, one of the"):
            load_config(overrides=[both])


def test_the_width_of_a_head_follows_unless_it_is_given(tmp_path: Path) -> None:
    """Also when the other fields are overridden in a tree that was written before."""
    file = tmp_path / "config.yaml"
    for override, width in (("model.num_attention_heads=4", 64), ("model.head_dim=16", 16)):
        file.write_text(dump_config(load_config(overrides=[override])))
        assert load_config(file=file, overrides=["model.hidden_size=256"]).model.head_dim == width


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source={kind: hub, repository: ag_news, column: text}"],
        ["data.source.kind=hub", "data.source.repository=ag_news"],
    ],
)
def test_a_source_of_another_kind_takes_the_place_of_the_one_before(overrides: list[str]) -> None:
    hub = load_config(overrides=overrides).data.source
    assert hub.kind == "hub"
    assert hub.model_dump(exclude_defaults=True) == {"repository": "ag_news"}
    back = [*overrides, "data.source={kind: files, column: body}"]
    files = load_config(overrides=back).data.source
    assert files.model_dump(exclude_defaults=True) == {"column": "body"}
    # A part of the same kind is still laid over the rest of it.
    limited = load_config(overrides=[*overrides, "data.source.limit=5"]).data.source
    assert limited == hub.model_copy(update={"limit": 5})


keys = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    st.integers(), lambda below: st.dictionaries(keys, below, max_size=3), max_leaves=8
)


@given(st.dictionaries(keys, trees), st.dictionaries(keys, trees))
def test_merge_keeps_what_the_change_does_not_name(base: dict, change: dict) -> None:
    merged = merge(base, change)
    assert merge(merged, change) == merged
    assert merge(base, {}) == base
    assert set(merged) == set(base) | set(change)
    for key in set(base) - set(change):
        assert merged[key] == base[key]


@given(st.lists(keys, min_size=1, max_size=4), st.integers())
def test_an_override_reaches_the_leaf_that_it_names(path: list[str], value: int) -> None:
    tree = parse_override(f"{'.'.join(path)}={value}")
    for part in path:
        tree = tree[part]
    assert tree == value


def test_reading_the_tree_imports_no_torch() -> None:
    code = "import sys; from infini_model import load_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_section_says_whether_it_decides_the_weights() -> None:
    for name, field in Config.model_fields.items():
        assert "decides_weights" in vars(field.annotation), name  # type: ignore[arg-type]
    deciding = {"run": {"seed"}} | {
        name: set(Config.model_fields[name].annotation.model_fields)  # type: ignore[union-attr]
        for name in ("packing", "model", "training")
    }
    # The width of a head is written down only where it was asked for.
    config = load_config(overrides=["model.head_dim=16"])
    assert {name: set(section) for name, section in config.identity.items()} == deciding


def test_a_moved_key_has_a_place_today_and_none_at_the_old_one() -> None:
    for old, new in MOVED.items():
        (before, key), (after, name) = old.split("."), new.split(".")
        assert not hasattr(getattr(Config(), before), key)
        assert hasattr(getattr(Config(), after), name)


@given(st.sets(st.sampled_from(sorted(MOVED))))
def test_what_a_former_version_wrote_is_read_at_todays_places(old: set[str]) -> None:
    values = {key: number for number, key in enumerate(sorted(old))}
    before: dict[str, Any] = {"data": {"name": "text"}}
    after: dict[str, Any] = {"data": {"name": "text"}}
    for key, value in values.items():
        before = merge(before, parse_override(f"{key}={value}"))
        after = merge(after, parse_override(f"{MOVED[key]}={value}"))
    moved = with_keys_moved(before)
    assert {name: section for name, section in moved.items() if section} == after
    assert with_keys_moved(after) == after


def test_every_key_says_what_it_is() -> None:
    """The descriptions are the help of the UI's form."""
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            nested = hasattr(field.annotation, "model_fields")
            assert nested or field.description, f"{section.annotation}.{name} has no description"
