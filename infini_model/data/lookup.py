"""The finished dataset that is meant by a path, a name or an address."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from infini_model.config import Config
from infini_model.config.locations import is_url, working_folder
from infini_model.config.tree import RunConfig
from infini_model.data.build import Dataset
from infini_model.data.datasets import Datasets, register_use
from infini_model.data.manifest import LATEST, Manifest, read_origin
from infini_model.data.store import StoredDatasets, datasets_at, no_dataset
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.storage import MANIFEST

KEY = re.compile(r"-[0-9a-f]{16}$")
# Where the datasets of a folder may be: it holds them, or is an output folder. One above it is not
# searched: whose datasets are meant there, or are added to by `infini run`, would be a guess.
BELOW = ("", "/datasets")
# So many of the datasets that there are, the newest, are listed for one that there is not.
LISTED = 10


def resolve_dataset(spec: Path | str | None, run: RunConfig) -> str:
    """The folder or the address of the dataset that `spec` means; None is the newest.

    It is the path or the address of a dataset, or of a folder of datasets or an output folder, of
    which the newest is meant; or a name with or without its key, or `latest`, among the datasets of
    `run`. A relative path counts from the working directory or the output folder. Nothing is
    created.

    Raises `DataError` in one line that lists the datasets there are, and as `ObjectStore` does.
    """
    own = datasets_at(run.datasets_dir, run.datasets_store)
    asked = LATEST if spec is None else str(spec).rstrip("/") or os.sep
    if asked == LATEST:
        return f"{own.place}/{own.newest()}"
    for place in [asked] if is_url(asked) else [asked, str(run.output_dir / asked)]:
        if is_dataset(place):
            return place
        if (folder := datasets_place(place)) is not None:
            return f"{folder}/{datasets_at(folder).newest()}"
    names = own.names()
    # A path may be the folder of a run that another machine has trained.
    shared = run.datasets_store is not None and not is_url(asked)
    word = Path(asked).name if shared else asked
    for name in names:
        if word == name or asked == KEY.sub("", name):
            return f"{own.place}/{name}"
    kept = run.datasets_store or run.datasets_dir
    has = ", ".join(names[:LISTED]) or "none yet; run the preprocess stage first"
    raise DataError(f"{asked}: is no dataset; {kept} has {has}")


def datasets_place(place: str) -> str | None:
    """The folder or the address of datasets that is meant by it or an output folder, if any."""
    for folder in (f"{place}{below}" for below in BELOW):
        with contextlib.suppress(DataError):
            datasets_at(folder).newest()
            return folder
    return None


def is_dataset(place: str) -> bool:
    """Whether a folder or an address is that of a finished dataset."""
    if is_url(place):
        return ObjectStore(place).find(MANIFEST) is not None
    return os.path.isfile(f"{place}/{MANIFEST}")  # noqa: PTH113 - False where nothing can be read


def check_holds_datasets(run: RunConfig) -> None:
    """Raise `ConfigError` if the place where datasets are to be made is a dataset itself."""
    place = str(run.datasets_store or run.datasets_dir)
    if is_dataset(place):
        raise ConfigError(
            f"run.data_dir: {place} is a finished dataset, and datasets are made beside each "
            "other; data.folder uses it as it is"
        )


def finished_dataset(config: Config) -> Dataset:
    """The dataset that `data.folder` means (see `resolve_dataset`), or the newest.

    One in an object store is described by its local folder from now on.

    Raises `DataError` in one line if there is none, or a shard is missing or damaged.
    """
    place, origin = resolve_dataset(config.data.folder, config.run), None
    datasets: Datasets
    if is_url(place):
        datasets, name = stored_dataset(place, config.run)
    else:
        folder = Path(place).resolve()
        origin, name = read_origin(folder), folder.name
        datasets = datasets_at(folder.parent, origin)
    register_use(datasets.folder / name)
    manifest = (_whole(datasets.folder / name) if origin else None) or datasets.find(name)
    if manifest is None:
        raise no_dataset(f"{datasets.place}/{name}")
    return Dataset(
        key=manifest.key,
        folder=(datasets.folder / name).resolve(),
        address=f"{datasets.place}/{name}" if is_url(datasets.place) else None,
        intact=True,
        reused=len(set(manifest.partitions)),
    )


def stored_dataset(address: str, run: RunConfig) -> tuple[StoredDatasets, str]:
    """The datasets beside the one at an address, and its name there."""
    parent, _, name = address.rpartition("/")
    own = parent == run.datasets_store
    return StoredDatasets(parent, run.datasets_dir if own else working_folder(parent)), name


def _whole(folder: Path) -> Manifest | None:
    """The manifest of a working copy with all its shards, for which nobody needs the store."""
    try:
        manifest = Datasets(folder.parent).find(folder.name)
    except DataError:
        return None
    files = [] if manifest is None else [name for name, _ in manifest.files()]
    return manifest if all((folder / name).exists() for name in files) else None
