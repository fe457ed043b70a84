"""Records of a corpus and a dataset folder, and verifying a folder against its manifest.

The records are frozen models that go to JSON and back without loss, so that the result of a stage
can be a file that a later process reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from infini_model.runtime import storage
from infini_model.runtime.cores import available_cores
from infini_model.runtime.errors import DataError

FORMAT_VERSION = 2
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Record(BaseModel):
    """A part of a manifest: immutable, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RawFile(Record):
    """A source file."""

    path: Path
    bytes: int
    sha256: str


class Bucket(Record):
    """The documents whose content hash begins with the same bits.

    `digest` is the SHA-256 of their sorted hashes: equal digests are equal documents.
    """

    documents: int
    bytes: int
    digest: str


class Corpus(Record):
    """What a source holds, by content, after it was downloaded and read once.

    `fingerprint` depends on the documents alone, as a multiset: not on the names, the order or the
    format of the files, nor on the number of buckets. `bytes` counts the documents' UTF-8,
    `skipped` the documents left out because they were empty, too short or not UTF-8.
    """

    files: list[RawFile]
    documents: int
    bytes: int
    skipped: int
    fingerprint: str
    buckets: list[Bucket]


class Shard(Record):
    """An Arrow file of a split; `partition` is the key of the partition it comes from."""

    file: str
    partition: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


class SplitRecord(Record):
    """A split: its size and its shards, in the order of the token stream."""

    documents: int
    tokens: int
    shards: list[Shard]


class TokenizerRecord(Record):
    """The tokenizer of a dataset; `dtype` is the smallest type that holds its ids."""

    spec: str
    vocab_size: int
    eos_token_id: int
    fingerprint: str
    dtype: Literal["uint8", "uint16", "int32"]


class CorpusRecord(Record):
    """The corpus that a dataset was made from, without its list of files."""

    fingerprint: str
    documents: int
    bytes: int
    skipped: int


class Manifest(Record):
    """What a dataset folder holds. `key` is the content key of `ingredients`."""

    format_version: int
    name: str
    key: str
    ingredients: dict[str, str | int | float]
    corpus: CorpusRecord
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
    def documents(self) -> int:
        """Number of documents in all splits."""
        return sum(split.documents for split in self.splits.values())

    @property
    def tokens(self) -> int:
        """Number of tokens in all splits, including end-of-text tokens."""
        return sum(split.tokens for split in self.splits.values())

    def files(self) -> Iterator[tuple[str, Shard]]:
        """Every shard with its path in the dataset folder."""
        for name, split in self.splits.items():
            for shard in split.shards:
                yield f"{name}/{shard.file}", shard


RecordType = TypeVar("RecordType", bound=Record)


def read_record(path: Path, kind: type[RecordType]) -> RecordType:
    """Read a JSON file as `kind`. Raises `DataError` that names a missing or damaged file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{path}: is damaged: {where}: {first['msg']}".replace("\n", " ")
        ) from error


def write_record(path: Path, record: Record) -> None:
    """Write a record as indented JSON, complete or not at all."""
    storage.write_json(path, record.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a dataset folder; the shards are not verified.

    Raises `DataError` in one line if the folder is missing, incomplete or not a dataset.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a dataset folder: it does not exist")
    if not (folder / "manifest.json").is_file():
        raise DataError(f"{folder}: is not a complete dataset folder: it has no manifest.json")
    manifest = read_record(folder / "manifest.json", Manifest)
    if manifest.format_version != FORMAT_VERSION:
        raise DataError(
            f"{folder}: has format version {manifest.format_version}, but this program reads "
            f"version {FORMAT_VERSION}; run the preprocess stage again"
        )
    return manifest


def metadata_files(manifest: Manifest) -> Iterator[str]:
    """The files beside the shards, as paths in the dataset folder."""
    yield "dataset_dict.json"
    if manifest.tokenizer.spec != "bytes":
        yield "tokenizer.json"
    for split in SPLITS:
        yield f"{split}/state.json"
        yield f"{split}/dataset_info.json"


def shard_fault(path: Path, size: int, checksum: str) -> str | None:
    """What is wrong with a shard, or None if it exists with this size and SHA-256."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes, the manifest says {size}"
        if storage.sha256(path) != checksum:
            return "is damaged: its checksum differs from the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def verify_dataset(folder: Path) -> Manifest:
    """Verify the checksum of every shard of a dataset folder against its manifest.

    Raises `DataError` in one line that names the first shard that is missing or damaged.
    """
    manifest = read_manifest(folder)
    for name in metadata_files(manifest):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: is missing")

    def fault(entry: tuple[str, Shard]) -> str | None:
        name, shard = entry
        wrong = shard_fault(folder / name, shard.bytes, shard.sha256)
        return wrong and f"{folder / name}: {wrong}"

    with ThreadPoolExecutor(max_workers=min(8, available_cores())) as pool:
        for wrong in pool.map(fault, manifest.files()):
            if wrong:
                raise DataError(wrong)
    return manifest


def latest_dataset(datasets_dir: Path) -> Path:
    """The folder that `<datasets>/latest` points to. Raises `DataError` if there is none."""
    link = datasets_dir / "latest"
    if not link.exists():
        raise DataError(f"{link}: there is no finished dataset yet; run the preprocess stage first")
    return link.resolve()
