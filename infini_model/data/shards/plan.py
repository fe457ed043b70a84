"""The plan stage: which dataset folder a configuration asks for, and whether it is intact."""

from __future__ import annotations

from pathlib import Path

from infini_model.config import Config
from infini_model.data.manifest import (
    Corpus,
    Manifest,
    Record,
    latest_dataset,
    verify_dataset,
)
from infini_model.data.shards.dataset import dataset_key
from infini_model.data.sources.corpus import drop_spill
from infini_model.data.sources.download import spill_folder
from infini_model.data.tokenizers.vocabulary import corpus_tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError


class Plan(Record):
    """A dataset by its content key, and the folder where it is or will be.

    `intact` means that the checksum of every shard was verified; `fault` says in one line what is
    wrong with an existing folder that is not intact.
    """

    key: str
    folder: Path
    intact: bool
    fault: str | None = None


def plan_dataset(corpus: Corpus, config: Config) -> Plan:
    """The dataset that a corpus becomes. Trains the tokenizer if the configuration says so.

    Raises `DataError` in one line for a bad tokenizer.
    """
    tokenizer = corpus_tokenizer(corpus, config.data, config.run.output_dir)
    key = dataset_key(corpus, tokenizer, config.data.splits)
    folder = (config.run.datasets_dir / f"{config.data.name}-{key[:16]}").resolve()
    if not folder.exists():
        return Plan(key=key, folder=folder, intact=False)
    try:
        verify_dataset(folder)
    except DataError as error:
        return Plan(key=key, folder=folder, intact=False, fault=str(error))
    storage.point_latest(folder)
    drop_spill(spill_folder(corpus, config.data, config.run.output_dir))
    return Plan(key=key, folder=folder, intact=True)


def finished_dataset(config: Config) -> Plan:
    """The dataset of `data.folder` (a dataset, or a folder with a `latest` link), or the newest.

    Raises `DataError` in one line if there is none, or a shard is missing or damaged.
    """
    folder = config.data.folder
    if folder is None:
        folder = latest_dataset(config.run.datasets_dir)
    elif not (folder / "manifest.json").is_file() and (folder / "latest").is_dir():
        folder = folder / "latest"
    manifest: Manifest = verify_dataset(folder)
    return Plan(key=manifest.key, folder=folder.resolve(), intact=True)
