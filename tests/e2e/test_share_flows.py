"""`infini preprocess --share`: commands that share nothing but the folder of datasets."""

from pathlib import Path

import pytest
from commands import Environment, infini, run, tiny, write_settings, write_texts

from infini_model.data.manifest import read_manifest

pytestmark = pytest.mark.story


def test_the_last_share_puts_the_dataset_together(connected: Environment, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 40, words=15_000)
    settings = write_settings(tmp_path / "settings.yaml", tiny(texts, tmp_path / "output"))
    one = infini("preprocess", "--config", settings, "data.partition_megabytes=1", "--share")
    first = run([*one, "1/2"], connected)
    assert first.returncode == 0, first.stdout + first.stderr
    *_, last = first.stdout.splitlines()
    assert last.startswith("Share 1/2 is done; ")
    assert last.endswith(" partitions of other shares are missing")
    assert "share 1/2: " in first.stdout + first.stderr
    datasets = tmp_path / "output" / "datasets"
    assert not list(datasets.glob("tiny-*"))

    whole = infini("run", "--config", settings, "data.partition_megabytes=1", "data.share=1/2")
    refused = run(whole, connected)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: data.share: 1/2 is done; ")

    second = run([*one, "2/2"], connected)
    assert second.returncode == 0, second.stdout + second.stderr
    (folder,) = datasets.glob("tiny-*")
    assert second.stdout.splitlines()[-1] == f"Dataset: {folder}"
    assert read_manifest(folder).documents == 40
