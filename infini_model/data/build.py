"""From the files of a source to a dataset folder of memory-mapped token shards and a manifest.

The work is done partition by partition, and each partition is kept by what decides its content, so
that only what is new is made. The dataset folder appears when it is complete; it links to the
partitions' files, or names the object store that has them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from infini_model.config import MEBIBYTE, Config, DataConfig
from infini_model.config.locations import is_url
from infini_model.config.tree import MODEL_SPEC
from infini_model.data.datasets import Build, Datasets, build_lock, register_build
from infini_model.data.engines import Engine, make_engine
from infini_model.data.make_partition import id_dtype
from infini_model.data.manifest import (
    FORMAT_VERSION,
    PARTITIONS,
    SPLITS,
    CorpusRecord,
    Manifest,
    Split,
    SplitRecord,
    TokenizerRecord,
)
from infini_model.data.partitions import (
    CommonSpec,
    Partition,
    PartitionRecord,
    PartitionSpec,
    plan_partitions,
)
from infini_model.data.sources.files import FileRange, Listing
from infini_model.data.sources.formats import bytes_of
from infini_model.data.sources.listing import named_settings, reading_of
from infini_model.data.sources.rows import Reading
from infini_model.data.store import datasets_at
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer, check_tokenizer, sample_of
from infini_model.data.tokenizers.trained import PinnedTokenizer, dataset_tokenizer
from infini_model.runtime import machine, storage
from infini_model.runtime.errors import DataError, UnreachableError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.records import Record, write_record
from infini_model.runtime.stage_protocol import OnProgress

log = logging.getLogger(__name__)

# Those on which the content of a dataset may depend.
PACKAGES = ("infini-llama", "numpy", "pyarrow", "tokenizers", "gigatoken")
LEFT_OUT = "empty, without an answer, under data.source.min_characters or not UTF-8"


def write_listing(listing: Listing, config: DataConfig, datasets_dir: Path) -> Path:
    """Keep a listing for those who build a dataset of it; returns its file. Raises `UserError`."""
    path = datasets_dir / ".listings" / listing_file(listing, config.name)
    write_record(path, listing)
    return path


def listing_file(listing: Listing, name: str) -> str:
    """The name of the file that keeps a listing, for datasets of this name."""
    contents = sorted(
        f"{source} {bytes_of(part)} {part.file.address}"
        for source, ranges in listing.sources.items()
        for part in ranges
    )
    return f"{name}-{storage.content_key(contents)[:16]}.json"


@dataclass(frozen=True)
class RequestedDataset:
    """The dataset that a configuration asks for, to be among `datasets`.

    `key` is a hash of `keys`, in hexadecimal. `pin` is that of a tokenizer that was trained for an
    earlier dataset of this name. `build` is what the dataset is made from, as it is noted before it
    is made. By source: `files`, what its partitions share in `common`, and `partitions` with their
    keys, sorted by these. Equal files make equal partitions, with the same key.
    """

    datasets: Datasets
    name: str
    folder: Path
    key: str
    tokenizer: Tokenizer
    pin: PinnedTokenizer | None
    files: dict[str, list[FileRange]]
    common: dict[str, CommonSpec]
    partitions: dict[str, list[tuple[str, Partition]]]
    keys: dict[str, list[str]]
    build: Build

    def specs(self, keys: Container[str]) -> list[PartitionSpec]:
        """The specs of the partitions of these keys, in order, each once."""
        wanted = {
            key: (self.common[name], partition)
            for name, partitions in self.partitions.items()
            for key, partition in partitions
            if key in keys
        }
        return [
            PartitionSpec(key=key, ranges=part.ranges, bytes=part.bytes, **common._asdict())
            for key, (common, part) in wanted.items()
        ]

    def manifest(self, records: Mapping[str, PartitionRecord], seconds: float) -> Manifest:
        """The manifest of the finished partitions, in the order of the token stream.

        `seconds` is how long it took to make those that were missing.
        """
        by_source = {name: [records[key] for key in keys] for name, keys in self.keys.items()}
        listed = [*itertools.chain.from_iterable(by_source.values())]
        return Manifest(
            format_version=FORMAT_VERSION,
            name=self.name,
            key=self.key,
            partitions=self.build.partitions,
            corpus=CorpusRecord(
                documents=sum(record.documents for record in listed),
                bytes=sum(record.bytes for record in listed),
                skipped=sum(record.skipped for record in listed),
            ),
            conversations=[n for n, each in self.common.items() if each.reading.conversations],
            tokenizer=next(iter(self.common.values())).tokenizer,
            splits={split: _split_record(split, by_source) for split in SPLITS},
            versions=machine.package_versions(*PACKAGES),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(seconds, 3),
        )


def _split_record(split: Split, records: Mapping[str, Sequence[PartitionRecord]]) -> SplitRecord:
    shards = [
        shard for each in records.values() for record in each for shard in record.shards[split]
    ]
    sources = {
        name: sum(len(record.shards[split]) for record in each) for name, each in records.items()
    }
    return SplitRecord(
        sources={} if "" in sources else sources,
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=[
            replace(shard, file=f"data-{number:05d}-of-{len(shards):05d}.arrow")
            for number, shard in enumerate(shards)
        ],
    )


def requested_dataset(listing: Listing, config: DataConfig, datasets: Datasets) -> RequestedDataset:
    """The dataset that the files of its sources become. Trains the tokenizer if it has to be.

    No text is read, but for training it. Raises `DataError` in one line for a bad tokenizer or a
    Parquet file that cannot be read.
    """
    facts = fact_cache(datasets.folder)
    target_bytes = config.partition_megabytes * MEBIBYTE
    readings, partitions = dict[str, Reading](), dict[str, list[Partition]]()
    for name, source in config.named_sources.items():
        readings[name] = reading_of(source)
        with named_settings(name):
            files = listing.sources[name]
            partitions[name] = plan_partitions(files, readings[name], target_bytes, facts)
    facts.save()
    tokenizer, pin = dataset_tokenizer(
        [(readings[name], each.ranges) for name, parts in partitions.items() for each in parts],
        config,
        datasets.tokenizers,
    )
    for name, reading in readings.items():
        if (chats := reading.conversations) is not None:
            chat = tokenizer.chat(config.named_sources[name].template)
            tokenizer.state_chat(chat)
            readings[name] = replace(reading, conversations=replace(chats, template=chat))
    record = TokenizerRecord(
        spec=tokenizer.spec,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        files=tokenizer.files,
        fingerprint=tokenizer.fingerprint,
        dtype=id_dtype(tokenizer.vocab_size).name,
    )
    common = {name: CommonSpec(each, record, config.splits) for name, each in readings.items()}
    keyed = {name: each.keyed(partitions[name]) for name, each in common.items()}
    keys = {name: [key for key, _ in each] for name, each in keyed.items()}
    # Names of sources belong to the key: by them a training weighs what it reads.
    key = storage.content_key(keys.get("", keys))
    return RequestedDataset(
        datasets=datasets,
        name=config.name,
        folder=datasets.folder / f"{config.name}-{key[:16]}",
        key=key,
        tokenizer=tokenizer,
        pin=pin,
        files={name: listing.sources[name] for name in common},
        common=common,
        partitions=keyed,
        keys=keys,
        build=Build(
            listing=listing_file(listing, config.name),
            partitions=[*itertools.chain.from_iterable(keys.values())],
        ),
    )


def build_dataset(
    listing: Listing,
    config: DataConfig,
    datasets_dir: Path,
    *,
    store: str | None = None,
    progress: OnProgress | None = None,
    make_engine: Callable[[DataConfig, Tokenizer], Engine] = make_engine,
) -> Manifest:
    """Build `<datasets_dir>/<name>-<key>/`, or reuse it; `latest` then is this one.

    With `store`, the address of datasets that machines share, partitions and dataset are made
    there, and the folder has no shards.

    An existing dataset is reused if it is intact; otherwise only the partitions that are missing or
    damaged are made. If two processes of a machine ask for the same dataset, one does the work.
    `progress(done, total)` counts the bytes of text to tokenise.

    Raises `DataError` in one line for a bad tokenizer, a file that cannot be read or has changed
    since it was listed, or a source without documents; `UserError` for a full disk or a folder that
    cannot be written; `StoreError` and `UnreachableError` for a store that refuses or stays away.
    """
    datasets = datasets_at(datasets_dir, store)
    wanted = requested_dataset(listing, config, datasets)
    name = wanted.folder.name
    with storage.lock(build_lock(wanted.folder)):
        register_build(wanted.folder, wanted.build)
        try:
            manifest = datasets.find(name)
        except DataError as error:
            log.warning("%s; rebuilding the dataset from its partitions", error)
            manifest = None
        if manifest is not None:
            log.info("dataset %s/%s: reused", datasets.place, name)
        else:
            began = time.monotonic()
            engine = make_engine(config, wanted.tokenizer)
            records = _make_partitions(wanted, engine, progress)
            _check_documents(wanted, records)
            manifest = wanted.manifest(records, time.monotonic() - began)
            datasets.write(manifest, wanted.tokenizer)
        datasets.point_latest(name)
    _warn_of_separator(wanted, manifest)
    if skipped := manifest.corpus.skipped:
        documents = "1 document is" if skipped == 1 else f"{skipped:,} documents are"
        log.info("dataset %s: %s left out, as %s", name, documents, LEFT_OUT)
    for split in SPLITS:
        if not manifest.splits[split].documents and getattr(config.splits, split):
            log.warning(
                "dataset %s: no document is in the %s split; add documents, cut files into several "
                "by data.source.separator, or raise data.splits.%s",
                name,
                split,
                split,
            )
    return manifest


def _warn_of_separator(wanted: RequestedDataset, manifest: Manifest) -> None:
    """Tell of one that occurs in no file; each is then one document, perhaps left out."""
    separators = [each.reading.separator for each in wanted.common.values()]
    files = [*itertools.chain.from_iterable(wanted.files.values())]
    is_text, corpus = all(part.kind == "text" for part in files), manifest.corpus
    if all(separators) and is_text and corpus.documents + corpus.skipped == len(files):
        many, first = f"{len(files):,} files", files[0].file.address
        none = f"{separators[0]!r} occurs in none of {many}; each is one document, such as {first}"
        log.warning("data.source.separator: %s", none)


def _make_partitions(
    wanted: RequestedDataset, engine: Engine, progress: OnProgress | None
) -> dict[str, PartitionRecord]:
    """Return the partitions of a dataset; make those that are missing."""
    datasets, keys = wanted.datasets, wanted.build.partitions
    records = datasets.find_partitions(keys)
    missing = wanted.specs(set(keys) - records.keys())
    count = "1 partition" if len(missing) == 1 else f"{len(missing):,} partitions"
    place, present = f"{datasets.place}/{wanted.folder.name}", f"{len(records):,}"
    log.info("dataset %s: %s to make, %s present", place, count, present)
    done, total = 0, sum(spec.bytes for spec in missing)

    def advance(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        if progress is not None:
            progress(done, total)

    if missing:
        engine.make(missing, datasets, advance)
        records |= datasets.read_records([spec.key for spec in missing])
    for key in keys:
        if key not in records:
            raise DataError(
                f"{datasets.place}/{PARTITIONS}/{key}: was lost after it was made; run again"
            )
    return records


def _check_documents(wanted: RequestedDataset, records: Mapping[str, PartitionRecord]) -> None:
    """Raise `DataError` if nothing is left of a source: it has no documents, or all are skipped."""
    for name, files in wanted.files.items():
        own = [records[key] for key in wanted.keys[name]]
        if not sum(record.documents for record in own):
            first, more = files[0].file.address, len(files) - 1
            skipped = sum(record.skipped for record in own)
            raise DataError(
                f"{first}{f' and {more} more' if more else ''}: no documents left: {skipped} of "
                f"{skipped} are {LEFT_OUT}"
            )


class Dataset(Record):
    """A dataset by its content key, and the folder where it is or will be.

    `address` is the dataset in an object store, of which the folder is a working copy. `intact`
    means that it was found complete and undamaged; `fault` says in one line what is wrong with an
    existing dataset that was not. `new` and `reused` count partitions.
    """

    key: str
    folder: Path
    address: str | None = None
    intact: bool
    new: int = 0
    reused: int = 0
    fault: str | None = None

    @property
    def place(self) -> str:
        """The place where all machines find it: its address, else its folder."""
        return self.address or str(self.folder)


def plan_dataset(listing: Listing, config: Config) -> Dataset:
    """The dataset that a source becomes. Trains the tokenizer if the configuration says so.

    One that exists becomes `latest`.

    Raises `DataError` in one line for a bad tokenizer or a Parquet file that cannot be read,
    `ConfigError` if the tokenizer is not that of the weights that are to be trained.
    """
    datasets = datasets_at(config.run.datasets_dir, config.run.datasets_store)
    wanted = requested_dataset(listing, config.data_to_tokenize, datasets)
    if wanted.pin is not None:
        log.info(
            "tokenizer: reusing the one trained for dataset %s on %s; "
            "a dataset of another data.name trains another",
            config.data.name,
            wanted.pin.trained,
        )
    _check_tokenizer(config, wanted)
    register_build(wanted.folder, wanted.build)
    name, keys, fault = wanted.folder.name, set(wanted.build.partitions), None
    try:
        intact = datasets.find(name) is not None
    except DataError as error:
        intact, fault = False, str(error)
    if intact:
        datasets.point_latest(name)
    new = 0 if intact else datasets.count_missing(keys)
    plan = Dataset(
        key=wanted.key,
        folder=wanted.folder.resolve(),
        address=f"{datasets.place}/{name}" if is_url(datasets.place) else None,
        intact=intact,
        new=new,
        reused=len(keys) - new,
        fault=fault,
    )
    if fault is None:
        counts = f"{new:,} partition{'' if new == 1 else 's'} new, {plan.reused:,} reused"
        log.info("dataset %s: %s", plan.place, counts)
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
