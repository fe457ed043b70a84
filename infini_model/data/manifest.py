"""Records of a dataset folder: its manifest and what that consists of."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from infini_model.runtime import storage
from infini_model.runtime.errors import DataError
from infini_model.runtime.records import Record, parse_record, read_bytes, read_record

FORMAT_VERSION = 5
ORIGIN = "origin.json"
LATEST = "latest"
# Written once, as a dataset folder is put together, and again when all its shards are compared.
ASSEMBLED = "dataset_dict.json"
AGAIN = "run the preprocess stage again"
PARTITIONS = ".partitions"  # the shards of all datasets of a folder or an address
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


# Not a `Record`: of a million partitions there are millions, and each would take three times the
# memory.
@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Shard:
    """An Arrow file of a split.

    `path` is where its partition has it, `<partition key>/<name>`. `start` is where in the file its
    arrays begin; see `array_starts`.
    """

    file: str
    path: str
    documents: int
    tokens: int
    start: int
    bytes: int
    sha256: str


def array_starts(start: int, documents: int, tokens: int, itemsize: int) -> tuple[int, int, int]:
    """Where the arrays of a shard begin in its file: offsets, values, and what is learned.

    They are int32 [documents + 1], the documents' starts; [tokens], the ids; and of conversations,
    after the starts once more, a bit a token, the lowest of each byte first. Arrow pads each to a
    multiple of 8 bytes.
    """
    values = start + (starts := -(-4 * (documents + 1) // 8) * 8)
    return start, values, values + -(-itemsize * tokens // 8) * 8 + starts


class SplitRecord(Record):
    """A split: its size and its shards, in the order of the token stream; none if it is empty.

    `sources` are the numbers of shards of the named sources, one source after the other.
    """

    documents: int
    tokens: int
    shards: list[Shard]
    sources: dict[str, int] = Field(default={}, exclude_if=lambda sources: not sources)

    def slices(self) -> dict[str, slice]:
        """The shards of each source; of one without a name, all of them."""
        counts = self.sources or {"": len(self.shards)}
        ends = itertools.accumulate(counts.values())
        return {
            name: slice(end - count, end)
            for (name, count), end in zip(counts.items(), ends, strict=True)
        }


class TokenizerRecord(Record):
    """The tokenizer of a dataset; `dtype` is the smallest type that holds its ids.

    `bos_token_id` is the token that begins every document, None if nothing does. `files` are those
    that it is loaded from, in the folder of the dataset.
    """

    spec: str
    vocab_size: int
    eos_token_id: int
    bos_token_id: int | None = Field(default=None, exclude_if=lambda token: token is None)
    fingerprint: str
    dtype: Literal["uint8", "uint16", "int32"]
    files: tuple[str, ...] = ("tokenizer.json",)


class TokenizerSample(Record):
    """A tokenizer's fingerprint, and a hash of the ids that it gives for a fixed set of texts."""

    fingerprint: str
    ids: str


class CorpusRecord(Record):
    """The documents that a dataset was made from; `bytes` counts their UTF-8.

    `skipped` counts the documents left out because they were empty, too short or not UTF-8.
    """

    documents: int
    bytes: int
    skipped: int


class Manifest(Record):
    """What a dataset folder holds.

    `key` is the content key of `partitions`, the keys of its partitions, sorted within each source.
    Shards of the sources in `conversations` have a column more, `learnt`: whether each token is
    learned. A source without a name is "".
    """

    format_version: Literal[5]  # FORMAT_VERSION
    name: str
    key: str
    partitions: list[str]
    corpus: CorpusRecord
    conversations: list[str] = Field(default=[], exclude_if=lambda sources: not sources)
    tokenizer: TokenizerRecord
    splits: dict[Split, SplitRecord]
    versions: dict[str, str]
    created: str
    seconds: float

    @property
    def folder_name(self) -> str:
        """Name of the dataset folder: the dataset's name and the first 16 digits of the key."""
        return f"{self.name}-{self.key[:16]}"

    @property
    def tokens(self) -> int:
        """Number of tokens in all splits, including those that begin and end documents."""
        return sum(split.tokens for split in self.splits.values())

    def files(self) -> Iterator[tuple[str, Shard]]:
        """Every shard with its path in the dataset folder."""
        for name, split in self.splits.items():
            for shard in split.shards:
                yield f"{name}/{shard.file}", shard


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a dataset folder, parsed once; the shards are not verified.

    Raises `DataError` in one line if the folder is missing, incomplete or not a dataset.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a dataset folder: it does not exist")
    path = folder / storage.MANIFEST
    if not path.is_file():
        raise DataError(f"{folder}: is not a complete dataset folder: it has no {storage.MANIFEST}")
    stat = path.stat()
    return _parsed(folder, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(1)  # of a million partitions, the last one only
def _parsed(folder: Path, _version: tuple[int, ...]) -> Manifest:
    return parse_manifest(read_bytes(folder / storage.MANIFEST), str(folder))


def parse_manifest(content: bytes, place: str) -> Manifest:
    """The manifest of the dataset at `place`, a folder or an address. Raises `DataError`."""
    try:
        return parse_record(content, f"{place}/{storage.MANIFEST}", Manifest)
    except DataError:
        version = re.search(rb'"format_version": *(\d+)', content)
        if version and int(version[1]) != FORMAT_VERSION:
            raise DataError(
                f"{place}: has format version {int(version[1])}, but this program reads version "
                f"{FORMAT_VERSION}; {AGAIN}"
            ) from None
        raise


def metadata_files(manifest: Manifest) -> Iterator[str]:
    """The files beside the shards, as paths in the dataset folder."""
    yield ASSEMBLED
    if manifest.tokenizer.spec != "bytes":
        yield from manifest.tokenizer.files
    for split in SPLITS:
        yield f"{split}/state.json"
        yield f"{split}/dataset_info.json"


class Origin(Record):
    """The datasets in an object store that a dataset folder is a working copy of, by address."""

    datasets: str


def read_origin(folder: Path) -> str | None:
    """The address of the datasets that a working copy is from; None if the folder is no copy.

    Raises `DataError` if the record is damaged.
    """
    path = folder / ORIGIN
    return read_record(path, Origin).datasets if path.exists() else None


def has_own_shards(folder: Path) -> bool:
    """Tell if the shards of a dataset are in its folder.

    In a bucket that is mounted they are in `.partitions` beside it.
    """
    latest = folder.parent / LATEST
    # In a store `latest` is an object, in a folder of this machine a link.
    return latest.is_symlink() or not latest.is_file()
