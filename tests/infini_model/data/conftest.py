"""Datasets made once for all tests of the data path."""

from pathlib import Path

import pytest
from corpora import build, files_config, make_texts, write_parquet


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(300)


@pytest.fixture(scope="session")
def byte_dataset(tmp_path_factory, texts) -> Path:
    """A dataset folder of byte tokens."""
    root = tmp_path_factory.mktemp("bytes")
    config = files_config(
        write_parquet(root / "raw.parquet", texts),
        splits={"train": 0.6, "validation": 0.2, "test": 0.2},
    )
    return build(config, root)[1]
