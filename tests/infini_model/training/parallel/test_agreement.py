"""Ranks with different settings or datasets are told which, at once and everywhere."""

import os
import re
import shutil

import pytest
from trainings import on_two_ranks

from infini_model.data.manifest import read_manifest
from infini_model.runtime.errors import ConfigError
from infini_model.training.loop import train
from infini_model.training.parallel.agreement import check_agreement
from infini_model.training.parallel.distributed import join_world


def disagree(folder, *settings):
    """Compare the settings of the rank with those of the other, and note what is said."""
    with join_world(settings[0][0].launch) as world:
        for number, each in enumerate(settings):
            said = "nothing"
            try:
                check_agreement(each[world.rank], each[2 + world.rank], world)
            except ConfigError as error:
                said = str(error)
            (folder / f"{number}-{world.rank}").write_text(said)


def test_the_first_setting_that_differs_is_named_on_both_ranks(make_config, tmp_path):
    node = {"num_nodes": 2, "rdzv_endpoint": "first:1"}
    here = {
        "run": {"name": "r", "output_dir": str(tmp_path / "other")},
        "launch": node | {"node_rank": 1, "processes": 2, "hang_timeout_seconds": 5},
        "checkpoint": {"save_total_limit": 9},
        "stages": {"train": {"retries": 0}},
        "data": {"name": "mine"},
    }
    there = make_config(run={"name": "r"}, launch=node)
    cases = [
        (there, make_config(**here), "k", "k"),
        (there, make_config(**here | {"model": {"hidden_size": 128}}), "k", "k"),
        (there, make_config(**here | {"training": {"precision": "bf16"}}), "k", "k"),
        (there, make_config(**here | {"logging": {"eval_steps": 6}}), "k", "k"),
        (there, make_config(**here), "k", "l"),
    ]
    on_two_ranks(disagree, tmp_path, *cases)
    told = [
        [(tmp_path / f"{number}-{rank}").read_text() for rank in (0, 1)]
        for number in range(len(cases))
    ]
    differ = [
        "model.hidden_size is 32 on the first machine, 128",
        "training.precision is 'auto' on the first machine, 'bf16'",
        "logging.eval_steps is 5 on the first machine, 6",
        "dataset is 'k' on the first machine, 'l'",
    ]
    assert told == [
        ["nothing"] * 2,
        *([f"{each} on that of rank 1", f"{each} here"] for each in differ),
    ]


def test_a_training_does_not_begin_with_another_dataset(dataset, make_config, tmp_path):
    config, other = make_config(), tmp_path / "other"
    shutil.copytree(dataset, other)
    manifest = other / "manifest.json"
    key = read_manifest(dataset).key
    manifest.write_text(manifest.read_text().replace(key, "f" * len(key)))
    with pytest.raises(Exception, match=re.escape(f"dataset is '{key}' on the first machine")):
        on_two_ranks(train_on, config, [dataset, other], tmp_path / "run")


def train_on(config, datasets, run_dir):
    """Train on the dataset of this rank."""
    train(config, datasets[int(os.environ["RANK"])], run_dir)
