"""One of N shares of the partitions of a dataset, made by machines that need not run at once.

A large file is read by one share alone, which makes its partitions; those of all other files are
divided by their keys. Each share records the fingerprints that it finds beside the datasets, so the
last one knows all files without having read them.
"""

from __future__ import annotations

from infini_model.config import MEBIBYTE, Config, DataConfig
from infini_model.data.build import RequestedDataset, make_partitions, requested_dataset
from infini_model.data.datasets import register_build
from infini_model.data.engines import make_engine
from infini_model.data.sources.files import Listing
from infini_model.data.sources.formats import text_of_file
from infini_model.data.sources.listing import divide_files, list_sources
from infini_model.data.store import datasets_at
from infini_model.runtime.stage_protocol import OnProgress


def make_share(
    listing: Listing, config: Config, progress: OnProgress | None = None
) -> tuple[Listing, int]:
    """Make what is missing of `data.share`; `progress` and the errors are `build_dataset`'s.

    A partition belongs to a share whether it exists or not: so shares are disjoint, wherever and
    whenever each is made. No lock is held but those of partitions.

    Returns the files as they are known now, of which other shares may have read more, and how many
    partitions of others are missing; if none is, `build_dataset` finds them all.
    """
    run, data = config.run, config.data_to_tokenize
    datasets = datasets_at(run.datasets_dir, run.datasets_store)
    wanted = requested_dataset(listing, data, datasets)
    register_build(wanted.folder, wanted.build)
    own = _keys_of_share(wanted, listing, data)
    engine = make_engine(data, wanted.tokenizer)
    make_partitions(wanted, own, f"share {data.share}", engine, progress)
    if listing.unread:
        listing = list_sources(
            data, run.output_dir, datasets_dir=run.datasets_dir, store=run.datasets_store
        )
        wanted = requested_dataset(listing, data, datasets)
    target = data.partition_megabytes * MEBIBYTE
    unread = sum(-(-text_of_file(part) // target) for part in listing.unread)
    return listing, datasets.count_missing(wanted.build.partitions) + unread


def _keys_of_share(wanted: RequestedDataset, listing: Listing, config: DataConfig) -> list[str]:
    """The keys of the partitions of a share, each once."""
    number, count = config.share_of
    share_of = divide_files(listing, config)
    owned = [
        (key, share_of.get(partition.ranges[0].file.address))
        for source in wanted.sources
        for key, partition in source.partitions
    ]
    common = list(dict.fromkeys(key for key, owner in owned if owner is None))
    own = [key for key, owner in owned if owner == number]
    return list(dict.fromkeys([*own, *common[number - 1 :: count]]))
