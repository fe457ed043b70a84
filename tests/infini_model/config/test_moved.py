"""Settings that an earlier version recorded are read under their new keys."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import Config, merge, parse_override
from infini_model.config.moved import MOVED, with_keys_moved


def test_a_moved_key_exists_in_its_new_place_only() -> None:
    for old, new in MOVED.items():
        (before, key), (after, name) = old.split("."), new.split(".")
        assert not hasattr(getattr(Config(), before), key)
        assert hasattr(getattr(Config(), after), name)


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
