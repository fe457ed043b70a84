"""Files and overrides: dumped settings load equal, and unreadable files are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import load_config, merge, parse_override
from infini_model.config.reading import _parse_json
from infini_model.runtime.errors import ConfigError


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


def test_a_key_that_a_file_leaves_open_has_to_be_given(tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text('training: {max_steps: "???"}\ndata: {source: {paths: ["???"]}}')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert (
        str(caught.value) == "training.max_steps: missing; give a value: training.max_steps=VALUE"
    )
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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torn.json", '{\n  /* two\n  lines */ "training": {"max_steps": }\n}'),
        ("open.json", "{\n\n  /* never closed\n}"),
        ("torn.yaml", "# one\ntraining:\n  max_steps: [\n"),
    ],
)
def test_a_syntax_error_names_the_file_and_line(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: .*line [34]\b") as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_json_without_comments_parses_as_json_loads_does(value: object) -> None:
    text = json.dumps({"key": value}, ensure_ascii=False)
    assert _parse_json(text) == json.loads(text)


def test_later_overrides_win_and_yaml_and_json_agree(tmp_path: Path) -> None:
    config = load_config(overrides=["training.max_steps=3", "training.max_steps=4"])
    assert config.training.max_steps == 4
    assert load_config(overrides=["training.learning_rate=1e-5"]).training.learning_rate == 1e-5
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    assert load_config(file=file) == config


keys = st.text("abc", min_size=1, max_size=2)


trees = st.recursive(
    st.integers(), lambda below: st.dictionaries(keys, below, max_size=3), max_leaves=8
)


@given(st.dictionaries(keys, trees), st.dictionaries(keys, trees))
def test_merge_keeps_keys_that_the_change_does_not_name(base: dict, change: dict) -> None:
    merged = merge(base, change)
    assert merge(merged, change) == merged
    assert merge(base, {}) == base
    assert set(merged) == set(base) | set(change)
    for key in set(base) - set(change):
        assert merged[key] == base[key]


@given(st.lists(keys, min_size=1, max_size=4), st.integers())
def test_an_override_sets_the_leaf_it_names(path: list[str], value: int) -> None:
    tree = parse_override(f"{'.'.join(path)}={value}")
    for part in path:
        tree = tree[part]
    assert tree == value


def test_reading_the_tree_imports_no_torch() -> None:
    code = "import sys; from infini_model import load_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
