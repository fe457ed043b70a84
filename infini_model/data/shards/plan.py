"""The plan stage: which dataset folder a configuration asks for, and what of it stands."""

from __future__ import annotations

import logging
from pathlib import Path

from infini_model.config import Config
from infini_model.config.locations import is_url, working_folder
from infini_model.config.tree import MODEL_SPEC, RunConfig
from infini_model.data.builds import note_build, note_use
from infini_model.data.keeping.datasets import Datasets, datasets_in, make_newest
from infini_model.data.keeping.named import dataset_folder
from infini_model.data.keeping.stored_datasets import StoredDatasets, no_dataset
from infini_model.data.manifest import Manifest, read_origin
from infini_model.data.shards.dataset import RequestedDataset, requested_dataset
from infini_model.data.shards.partition_store import PARTITIONS
from infini_model.data.sources.files import Listing
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.tokenizer import check_tokenizer, sample_of
from infini_model.data.verification import verify_dataset
from infini_model.runtime.errors import DataError, StoreError, UnreachableError
from infini_model.runtime.records import Record

log = logging.getLogger(__name__)


class Plan(Record):
    """A dataset by its content key, and the folder where it is or will be.

    `address` is the dataset in an object store, of which the folder is a working copy. `intact`
    means that it is complete and undamaged; `fault` says in one line what is wrong with an existing
    dataset that is not intact. `new` and `reused` count partitions.
    """

    key: str
    folder: Path
    address: str | None = None
    intact: bool
    new: int = 0
    reused: int = 0
    fault: str | None = None


def plan_dataset(listing: Listing, config: Config, *, previous: str | None = None) -> Plan:
    """The dataset that a source becomes. Trains the tokenizer if the configuration says so.

    One that stands becomes `latest`, as `make_newest` says of `previous`.

    Raises `DataError` in one line for a bad tokenizer or a Parquet file that cannot be read,
    `ConfigError` if the tokenizer is not that of the weights that are to be trained.
    """
    datasets_dir, store = config.run.datasets_dir, config.run.datasets_store
    wanted = requested_dataset(listing, config.data_to_tokenize, datasets_dir, store)
    if wanted.pin is not None:
        log.info(
            "tokenizer: reusing the one trained for dataset %s on %s; "
            "data.tokenizer.retrain=true trains another",
            config.data.name,
            wanted.pin.trained,
        )
    _check_tokenizer(config, wanted)
    note_build(wanted.folder, wanted.build)
    datasets, name = datasets_in(datasets_dir, store), wanted.folder.name
    keys = set(wanted.partition_keys)
    plan = Plan(
        key=wanted.key,
        folder=wanted.folder.resolve(),
        address=None if store is None else datasets.place_of(name),
        intact=False,
        reused=len(keys),
    )
    try:
        intact = datasets.find(name) is not None
    except StoreError:
        raise
    except DataError as error:
        return plan.model_copy(update={"fault": str(error)} | _missing(keys, datasets))
    if intact:
        make_newest(datasets, name, previous)
        plan = plan.model_copy(update={"intact": True})
    else:
        plan = plan.model_copy(update=_missing(keys, datasets))
    log.info("dataset %s: %s", plan.address or plan.folder, partition_counts(plan.new, plan.reused))
    return plan


def _check_tokenizer(config: Config, wanted: RequestedDataset) -> None:
    """Find out now what the training, which compares too, would refuse the finished dataset for.

    Where the weights cannot be asked, as they are on another machine, that is a warning.
    """
    weights, is_own = config.model.initial_weights, config.data.tokenizer.spec == MODEL_SPEC
    if weights is None or is_own or config.model.ignore_tokenizer:
        return
    try:
        own = sample_of(load_tokenizer(weights))
    except (DataError, UnreachableError) as error:
        log.warning("model.initial_weights: the tokenizers are not compared yet: %s", error)
        return
    check_tokenizer(weights, own, wanted.tokenizer, str(wanted.folder))


def _missing(keys: set[str], datasets: Datasets) -> dict[str, int]:
    """How many of the partitions have to be made, and how many stand."""
    new = len(keys - datasets.partitions.keys())
    return {"new": new, "reused": len(keys) - new}


def partition_counts(new: int, reused: int) -> str:
    """How much there is to do, as in `2 partitions new, 1,204 reused`."""
    return f"{new:,} partition{'' if new == 1 else 's'} new, {reused:,} reused"


def finished_dataset(config: Config) -> Plan:
    """The dataset that `data.folder` means (see `dataset_folder`), or the newest.

    One in an object store is described by its local folder from now on.

    Raises `DataError` in one line if there is none, or a shard is missing or damaged.
    """
    place = dataset_folder(config.data.folder, config.run)
    if is_url(place):
        stored, name = stored_dataset(place, config.run)
        note_use(stored.folder_of(name))
        return _found(stored, name)
    folder = Path(place).resolve()
    address = _address(folder)
    note_use(folder)
    if address is None:
        return _finished(verify_dataset(folder), folder, None)
    manifest = _whole(folder)
    if manifest is None:
        return _found(StoredDatasets(address, folder.parent), folder.name)
    return _finished(manifest, folder, f"{address}/{folder.name}")


def stored_dataset(address: str, run: RunConfig) -> tuple[StoredDatasets, str]:
    """The datasets beside the one at an address, and its name there."""
    parent, _, name = address.rpartition("/")
    own = parent == run.datasets_store
    return StoredDatasets(parent, run.datasets_dir if own else working_folder(parent)), name


def _found(datasets: StoredDatasets, name: str) -> Plan:
    manifest = datasets.find(name)
    if manifest is None:
        raise no_dataset(datasets.place_of(name))
    return _finished(manifest, datasets.folder_of(name).resolve(), datasets.place_of(name))


def _finished(manifest: Manifest, folder: Path, address: str | None) -> Plan:
    reused = len(set(manifest.partitions))
    return Plan(key=manifest.key, folder=folder, address=address, intact=True, reused=reused)


def _whole(folder: Path) -> Manifest | None:
    """The manifest of a working copy with all its shards, for which nobody needs the store."""
    try:
        manifest = verify_dataset(folder)
    except DataError:
        return None
    return manifest if all((folder / name).exists() for name, _ in manifest.files()) else None


def _address(folder: Path) -> str | None:
    """The address of the datasets that a local folder is a working copy of."""
    origin = read_origin(folder)
    return None if origin is None else origin.partitions.removesuffix(f"/{PARTITIONS}")
