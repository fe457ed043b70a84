"""Folders of settings that are addresses."""

import pytest

from infini_model.config import load_config
from infini_model.config.places import output_place


@pytest.mark.parametrize("output_dir", ["s3://bucket/team", "here", None])
def test_another_process_is_told_the_same_output_folder_and_store(
    tmp_path, monkeypatch, output_dir
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    chosen = [] if output_dir is None else [{"run": {"output_dir": output_dir}}]
    run = load_config(overrides=chosen).run
    monkeypatch.setenv("INFINI_OUTPUT_DIR", output_place(run.output_dir, run.store))
    told = load_config(overrides=[{"run": {"seed": 1}}]).run
    assert told.store == run.store
    assert told.output_dir.resolve() == run.output_dir.resolve()
