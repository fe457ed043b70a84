"""Datasets made once for all tests of the data path."""

from pathlib import Path

import pytest
from corpora import build, files_config, make_texts, write_files, write_parquet

from infini_model.config import DataConfig


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(300)


@pytest.fixture(scope="session")
def byte_dataset(tmp_path_factory, texts) -> Path:
    root = tmp_path_factory.mktemp("bytes")
    config = files_config(
        write_parquet(root / "raw.parquet", texts),
        splits={"train": 0.6, "validation": 0.2, "test": 0.2},
    )
    return build(config, root)[1]


@pytest.fixture
def several(tmp_path) -> DataConfig:
    """A configuration of 24 files in several partitions."""
    raw = write_files(tmp_path / "raw", [text * 100 for text in make_texts(24)])
    return files_config(raw / "*", partition_megabytes=1, workers=1)
