"""Names from other projects point to keys of the tree."""

import re

from infini_model.config.explaining import all_keys
from infini_model.config.names import NAMES


def test_every_foreign_name_points_to_existing_keys_and_is_not_a_key() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    sections = {key.rpartition(".")[0] for key in all_keys()}
    for name, meant in NAMES.items():
        assert name not in {*all_keys(), *leaves}
        named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", meant)
        assert named, f"{name} points to no key"
        for key in named:
            assert key in {*all_keys(), *sections}, f"{name} points to {key}, which does not exist"
