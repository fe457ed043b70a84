"""Which dataset is meant by a path, a name or an address."""

from __future__ import annotations

import os
import re
from pathlib import Path

from infini_model.config.locations import is_url
from infini_model.config.tree import RunConfig
from infini_model.data.keeping.datasets import Datasets, datasets_in
from infini_model.data.keeping.stored_datasets import LATEST
from infini_model.runtime.errors import ConfigError, DataError, StoreError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.storage import MANIFEST

KEY = re.compile(r"-[0-9a-f]{16}$")
# Where the datasets of a folder may be: it holds them, or is an output folder. One above it is not
# searched: whose datasets are meant there, or are added to by `infini run`, would be a guess.
BELOW = ("", "/datasets")
# So many of the datasets that there are are listed for one that there is not.
LISTED = 10


def dataset_folder(spec: Path | str | None, run: RunConfig) -> str:
    """The folder or the address of the dataset that `spec` means; None is the newest.

    It is the path or the address of a dataset, or of a folder of datasets or an output folder, of
    which the newest is meant; or a name with or without its key, or `latest`, among the datasets of
    `run`. A relative path counts from the working directory or the output folder. Nothing is
    created.

    Raises `DataError` in one line that lists the datasets there are, and as `ObjectStore` does.
    """
    own = datasets_in(run.datasets_dir, run.datasets_store)
    asked = LATEST if spec is None else str(spec).rstrip("/") or os.sep
    if asked == LATEST:
        return own.place_of(own.newest())
    for place in [asked] if is_url(asked) else [asked, str(run.output_dir / asked)]:
        found = _found_at(place)
        if found is not None:
            return found
    names = own.names()
    # A path may be the folder of a run that another machine has trained.
    shared = run.datasets_store is not None and not is_url(asked)
    word = Path(asked).name if shared else asked
    for name in names:
        if word == name or asked == KEY.sub("", name):
            return own.place_of(name)
    kept = run.datasets_store or run.datasets_dir
    if not names:
        has = "none yet; run the preprocess stage first"
    else:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        has = ", ".join(names[:LISTED]) + more
    raise DataError(f"{asked}: is no dataset; {kept} has {has}")


def datasets_place(place: str) -> str | None:
    """The folder or the address of datasets that is meant by it or an output folder, if any."""
    for folder in (f"{place}{below}" for below in BELOW):
        try:
            _datasets_at(folder).newest()
        except StoreError:
            raise
        except DataError:
            continue
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


def _found_at(place: str) -> str | None:
    """The dataset at a place, or the newest one that is kept there; None if there is neither."""
    if is_dataset(place):
        return place
    folder = datasets_place(place)
    if folder is None:
        return None
    datasets = _datasets_at(folder)
    return datasets.place_of(datasets.newest())


def _datasets_at(place: str) -> Datasets:
    return datasets_in(Path(place), None) if not is_url(place) else datasets_in(Path(), place)
