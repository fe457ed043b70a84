"""Settings that an earlier version recorded are read under their new keys."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import merge, parse_override
from infini_model.config.explaining import all_keys
from infini_model.config.moved import MOVED, REMOVED, with_keys_moved


def test_a_moved_key_exists_in_its_new_place_only() -> None:
    assert set(MOVED.values()) <= set(all_keys())
    assert not {*MOVED, *REMOVED} & set(all_keys())


def test_settings_without_a_successor_are_left_out() -> None:
    tree = {"logging": {"eval_batches": 2, "debug": True}, "evaluation": {"max_batches": None}}
    assert with_keys_moved(tree) == {"logging": {"debug": True}, "evaluation": {}}
    assert tree["logging"] == {"eval_batches": 2, "debug": True}


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
