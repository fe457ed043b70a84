"""From the files of a source to a dataset folder of memory-mapped token shards and a manifest.

The work is done partition by partition, and each partition is kept by what decides its content, so
that only what is new is made. The dataset folder appears when it is complete; it links to the
partitions' files, or names the object store that has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from infini_model.config import MEBIBYTE, DataConfig
from infini_model.data.builds import Build, build_lock, listing_file, note_build
from infini_model.data.keeping.datasets import Datasets, datasets_in, make_newest
from infini_model.data.manifest import SPLITS, Manifest, TokenizerRecord
from infini_model.data.shards.engine import Engine, make_engine
from infini_model.data.shards.folder import dataset_key, make_manifest
from infini_model.data.shards.layout import Partition, divide
from infini_model.data.shards.partition_store import PartitionStore
from infini_model.data.shards.partitions import PartitionRecord, PartitionSpec, Recipe
from infini_model.data.shards.writing import id_dtype
from infini_model.data.sources.documents import Progress
from infini_model.data.sources.download import reading_of
from infini_model.data.sources.files import Listing
from infini_model.data.threads import Advance
from infini_model.data.tokenizers.shelf import PinnedTokenizer, Shelf
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.data.tokenizers.vocabulary import dataset_tokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, StoreError
from infini_model.runtime.fact_cache import fact_cache_here

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestedDataset:
    """What a configuration asks for: its folder, its key, its tokenizer and its partitions.

    `partition_keys` are in order, and `partitions` in the same; equal files make equal partitions.
    `pin` is that of a tokenizer that was trained for an earlier dataset of this name. `listing` is
    the name of the file that keeps the listing it is made from.
    """

    folder: Path
    key: str
    tokenizer: Tokenizer
    pin: PinnedTokenizer | None
    recipe: Recipe
    partition_keys: list[str]
    partitions: list[Partition]
    listing: str

    @property
    def build(self) -> Build:
        """What the dataset is made from, as it is noted before it is made."""
        return Build(listing=self.listing, partitions=self.partition_keys)

    def specs(self, *, without: Container[str] = ()) -> list[PartitionSpec]:
        """The specs of the partitions in order, each once, `without` those of some keys."""
        distinct = dict(zip(self.partition_keys, self.partitions, strict=True))
        return [
            self.recipe.spec(key, partition)
            for key, partition in distinct.items()
            if key not in without
        ]


def requested_dataset(
    listing: Listing, config: DataConfig, datasets_dir: Path, store: str | None = None
) -> RequestedDataset:
    """The dataset that the files of a source become. Trains the tokenizer if it has to be.

    `datasets_dir` is the working folder of the address `store`, if there is one.

    No text is read, but for training a tokenizer. Raises `DataError` in one line for a bad
    tokenizer or a Parquet file that cannot be read.
    """
    reading = reading_of(config)
    facts = fact_cache_here(datasets_dir)
    target_bytes = config.partition_megabytes * MEBIBYTE
    partitions = divide(listing.ranges, reading, target_bytes, facts)
    facts.save()
    tokenizer, kept, pin = dataset_tokenizer(
        [partition.ranges for partition in partitions], reading, config, Shelf(datasets_dir, store)
    )
    record = TokenizerRecord(
        spec=tokenizer.spec,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        fingerprint=tokenizer.fingerprint,
        dtype=id_dtype(tokenizer.vocab_size).name,
    )
    recipe = Recipe(reading, record, kept, config.splits, config.batch_size)
    keyed = recipe.keyed(partitions)
    partition_keys = [each for each, _ in keyed]
    key = dataset_key(partition_keys)
    return RequestedDataset(
        folder=datasets_dir / f"{config.name}-{key[:16]}",
        key=key,
        tokenizer=tokenizer,
        pin=pin,
        recipe=recipe,
        partition_keys=partition_keys,
        partitions=[partition for _, partition in keyed],
        listing=listing_file(listing, config.name),
    )


def build_dataset(
    listing: Listing,
    config: DataConfig,
    output_dir: Path,
    *,
    datasets_dir: Path | None = None,
    store: str | None = None,
    previous: str | None = None,
    progress: Progress | None = None,
    make_engine: Callable[[DataConfig, Tokenizer], Engine] = make_engine,
) -> Manifest:
    """Build `<datasets_dir>/<name>-<key>/`, or reuse it; `latest` then, as a rule, is this one.

    `datasets_dir` defaults to `<output_dir>/datasets`. With `store`, the address of datasets that
    machines share, partitions and dataset are made there, and the folder has no shards. What
    `previous` does is what `make_newest` says.

    An existing dataset is reused if it is intact; otherwise only the partitions that are missing or
    damaged are made. If two processes of a machine ask for the same dataset, one does the work.
    `progress(done, total)` counts the bytes of text to tokenise.

    Raises `DataError` in one line for a bad tokenizer, a file that cannot be read or has changed
    since it was listed, or a source without documents; `UserError` for a full disk or a folder that
    cannot be written; `StoreError` and `UnreachableError` for a store that refuses or stays away.
    """
    datasets_dir = datasets_dir or output_dir / "datasets"
    wanted = requested_dataset(listing, config, datasets_dir, store)
    datasets, name = datasets_in(datasets_dir, store), wanted.folder.name
    with storage.lock(build_lock(wanted.folder)):
        note_build(wanted.folder, wanted.build)
        manifest = _find_intact(datasets, name)
        if manifest is None:
            began = time.monotonic()
            engine = make_engine(config, wanted.tokenizer)
            what, keys = f"dataset {datasets.place_of(name)}", wanted.partition_keys
            records = _partitions(wanted, keys, what, datasets.partitions, engine, progress)
            if not sum(record.documents for record in records):
                raise DataError(_no_documents(listing, wanted, records))
            manifest = make_manifest(
                config.name,
                wanted.partition_keys,
                wanted.recipe.tokenizer,
                records,
                time.monotonic() - began,
                pairs=wanted.recipe.reading.template is not None,
            )
            datasets.write(manifest, wanted.tokenizer)
        make_newest(datasets, name, previous)
    if skipped := manifest.corpus.skipped:
        documents = "1 document is" if skipped == 1 else f"{skipped:,} documents are"
        log.info("dataset %s: %s left out, as %s", name, documents, _skipped(wanted))
    for split in SPLITS:
        if not manifest.splits[split].documents and getattr(config.splits, split):
            log.warning(
                "dataset %s: no document is in the %s split; more documents, or a larger "
                "data.splits.%s, give it some",
                name,
                split,
                split,
            )
    return manifest


def make_share(
    listing: Listing,
    config: DataConfig,
    datasets_dir: Path,
    *,
    store: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Make what is missing of `data.share`, one of N shares of the partitions of a dataset.

    A share is every N-th partition in the order of their keys, whether it stands or not: so shares
    are disjoint, wherever and whenever each is made. No lock is held but those of partitions.

    Returns how many partitions of the other shares are missing; if none is, `build_dataset` finds
    them all. The arguments are its own, and so are the errors.
    """
    number, count = config.share_of or (1, 1)
    wanted = requested_dataset(listing, config, datasets_dir, store)
    note_build(wanted.folder, wanted.build)
    keys = list(dict.fromkeys(wanted.partition_keys))
    own, what = keys[number - 1 :: count], f"share {number}/{count}"
    partitions = datasets_in(datasets_dir, store).partitions
    engine = make_engine(config, wanted.tokenizer)
    _partitions(wanted, own, what, partitions, engine, progress)
    return len(set(keys) - set(own) - partitions.keys())


def _find_intact(datasets: Datasets, name: str) -> Manifest | None:
    """The manifest of an existing dataset that is intact, or None."""
    try:
        manifest = datasets.find(name)
    except StoreError:
        # The store refuses: building the dataset again would not help.
        raise
    except DataError as error:
        log.warning("%s; rebuilding the dataset from its partitions", error)
        return None
    if manifest is not None:
        log.info("dataset %s: reused", datasets.place_of(name))
    return manifest


def _partitions(
    wanted: RequestedDataset,
    keys: Sequence[str],
    what: str,
    store: PartitionStore,
    engine: Engine,
    progress: Progress | None,
) -> list[PartitionRecord]:
    """The partitions of some keys, in their order; makes those that are missing.

    `what` they are is for messages.
    """
    records, asked = store.find(keys), set(keys)
    missing = [spec for spec in wanted.specs(without=records) if spec.key in asked]
    count = "1 partition" if len(missing) == 1 else f"{len(missing):,} partitions"
    log.info("%s: %s to make, %s present", what, count, f"{len(records):,}")
    if missing:
        text_bytes = sum(spec.bytes for spec in missing)
        engine.make(missing, store, _progress_counter(text_bytes, progress))
        records |= store.find([spec.key for spec in missing], every=False)
    for key in keys:
        if key not in records:
            raise DataError(f"{store.place}/{key}: was lost after it was made; run again")
    return [records[key] for key in keys]


def _no_documents(
    listing: Listing, wanted: RequestedDataset, records: Sequence[PartitionRecord]
) -> str:
    """Why nothing is left: files that hold no documents, or only ones that are skipped."""
    addresses = [part.file.address for part in listing.ranges]
    first = addresses[0] if len(addresses) == 1 else f"{addresses[0]} and {len(addresses) - 1} more"
    skipped = sum(record.skipped for record in records)
    return f"{first}: no documents left: {skipped} of {skipped} are {_skipped(wanted)}"


def _skipped(wanted: RequestedDataset) -> str:
    """Which documents are skipped."""
    reading = wanted.recipe.reading
    why = "empty" if reading.template is None else "without a prompt or an answer"
    if reading.min_characters:
        why += f" or under data.source.min_characters {reading.min_characters}"
    if reading.errors == "skip":
        why += " or not UTF-8"
    return why


def _progress_counter(total: int, progress: Progress | None) -> Advance:
    """Sum up the bytes done and pass them to `progress` with their total."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        if progress is not None:
            progress(done, total)

    return advance
