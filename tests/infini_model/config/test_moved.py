"""Settings that an earlier version recorded are read under their new keys."""

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import merge, parse_override
from infini_model.config.evaluation_tasks import EvaluationTaskName
from infini_model.config.explaining import all_keys
from infini_model.config.moved import MOVED, REMOVED, TASKS, with_keys_moved


def test_a_moved_key_exists_in_its_new_place_only() -> None:
    assert set(MOVED.values()) <= set(all_keys())
    assert not {*MOVED, *REMOVED} & set(all_keys())


@pytest.mark.parametrize("section", ["logging", "training"])
def test_a_limit_that_was_counted_in_batches_is_counted_in_windows(section: str) -> None:
    tree: dict[str, Any] = {"evaluation": {"max_batches": 9}, "training": {"batch_size": 4}}
    tree = merge(tree, {section: {"eval_batches": 3}, "launch": {"processes": 2}})
    before = copy.deepcopy(tree)
    moved = with_keys_moved(tree)
    assert moved["evaluation"] == {"max_windows": 24}
    assert "eval_batches" not in moved.get(section, {})
    assert tree == before
    assert with_keys_moved({"evaluation": {"max_batches": None}}) == {"evaluation": {}}


def test_a_task_of_an_earlier_version_is_measured_under_its_new_name() -> None:
    assert set(TASKS.values()) <= set(get_args(EvaluationTaskName))
    moved = with_keys_moved({"evaluation": {"tasks": ["sample", *TASKS]}})
    assert moved == {"evaluation": {"tasks": ["sample", *TASKS.values()]}}


@given(st.sets(st.sampled_from(sorted(MOVED))))
def test_settings_of_an_earlier_version_are_read_under_their_new_keys(old: set[str]) -> None:
    values = {key: number for number, key in enumerate(sorted(old))}
    before: dict[str, Any] = {"data": {"name": "text"}}
    after: dict[str, Any] = {"data": {"name": "text"}}
    for key, value in values.items():
        before = merge(before, parse_override(f"{key}={value}"))
        after = merge(after, parse_override(f"{MOVED[key]}={value}"))
    moved = with_keys_moved(before)
    assert {name: section for name, section in moved.items() if section} == after
    assert with_keys_moved(after) == after
