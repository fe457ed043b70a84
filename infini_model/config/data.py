"""From text to windows: the sections `data` and `packing`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    WithJsonSchema,
    model_validator,
)

from infini_model.config.section import Fraction, Section

MEBIBYTE = 1 << 20


def _check_device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mixed", value):
        return value
    raise ValueError("takes auto, cpu, cuda, cuda:N, or mixed")


# For the form; the validator says more than that a pattern does not match.
DEVICE_SCHEMA = {"type": "string", "pattern": r"^(auto|cpu|cuda(:\d+)?|mixed)$"}
Device = Annotated[str, AfterValidator(_check_device), WithJsonSchema(DEVICE_SCHEMA)]


class FilesSource(Section):
    """Text in files: local ones are read in place, remote ones are brought down first."""

    kind: Literal["files"] = "files"
    paths: list[str] = Field(
        default=["{stdlib}/**/*.py"],
        min_length=1,
        description="Globs or URLs (http, https, s3, … by fsspec); {stdlib} is the folder of "
        "Python's own sources. .txt .md .rst .py hold one document a file; .jsonl (.gz, .zst), "
        ".parquet and .arrow one a row.",
    )
    column: str = Field("text", description="Column of .jsonl, .parquet and .arrow files to read.")
    errors: Literal["fail", "skip", "replace"] = Field(
        "fail",
        description="What to do about a document that is not UTF-8: stop and name it, leave it "
        "out, or put U+FFFD where it is broken.",
    )
    separator: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Text between the documents of a .txt, .md, .rst or .py file, such as a blank "
        "line; None takes a file as one document.",
    )
    min_characters: NonNegativeInt = Field(
        0, description="Shortest document to keep, in characters."
    )


class HubSource(Section):
    """A dataset of the Hugging Face hub, streamed into raw partitions."""

    kind: Literal["hub"] = "hub"
    repository: str = Field(description="Name on the hub, such as ccdv/arxiv-summarization.")
    configuration: str | None = Field(None, description="Configuration (subset) of the dataset.")
    split: str = Field("train", description="Split of the hub's dataset to read.")
    revision: str | None = Field(
        None, description="Commit, tag or branch; pinned to a commit when the download starts."
    )
    column: str = Field("text", description="Column that holds the text.")
    limit: PositiveInt | None = Field(None, description="Rows to read; None reads all of them.")
    min_characters: NonNegativeInt = Field(
        0, description="Shortest document to keep, in characters (applied after `limit`)."
    )


def source_kind(value: Any) -> Any:
    """The kind of source that a section of the tree describes."""
    if isinstance(value, Mapping):
        return value.get("kind", "files")
    return getattr(value, "kind", None)


Source = Annotated[
    Annotated[FilesSource, Tag("files")] | Annotated[HubSource, Tag("hub")],
    Discriminator(source_kind),
]


class TokenizerConfig(Section):
    """How text becomes token ids."""

    spec: str = Field(
        "bytes",
        min_length=1,
        description="bytes (each UTF-8 byte is a token), train (a byte-level BPE trained on the "
        "corpus), a path to a tokenizer.json, or the name of a tokenizer on the hub.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1 << 24)] = Field(
        4096, description="Entries of the vocabulary that `spec: train` makes."
    )


class SplitsConfig(Section):
    """Shares of the documents; a document's split is chosen by a hash of its content."""

    train: Fraction = Field(0.9, description="Share of the documents to train on.")
    validation: Fraction = Field(0.05, description="Share of the documents to validate on.")
    test: Fraction = Field(0.05, description="Share of the documents for the final test.")

    @model_validator(mode="after")
    def _sum_to_one(self) -> Self:
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        if self.train == 0.0:
            raise ValueError("train must be more than 0")
        return self


class DataConfig(Section):
    """From text to a dataset folder."""

    # What it decides is in the dataset's key, which depends on content alone.
    decides_weights = False

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "corpus", description="First part of the dataset folder's name; the content key follows."
    )
    source: Source = Field(FilesSource(errors="skip"), description="Where the text comes from.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    splits: SplitsConfig = SplitsConfig()
    folder: Path | None = Field(
        None, description="A finished dataset folder to use instead of making one."
    )
    partition_megabytes: PositiveInt = Field(
        32,
        description="Text in one partition at most, in MiB, the unit of parallel work and of "
        "reuse; there are a power of two of them, and a small corpus has smaller ones. Each "
        "thread needs five to ten times as much memory.",
    )
    workers: NonNegativeInt = Field(
        0,
        description="Threads that read and tokenise; 0 is one for each core, and to tokenise one "
        "more.",
    )
    device: Device = Field(
        "auto",
        description="Where to tokenise: cpu, which is auto as well; cuda, which is every GPU, or "
        "cuda:N; mixed is every GPU and the other cores. The tokens are the same everywhere.",
    )
    batch_size: PositiveInt = Field(
        1 << 16, description="Documents tokenised at once at most, of 16 MiB or one of any size."
    )


class PackingConfig(Section):
    """How the token stream is cut into windows; it never costs a new tokenisation."""

    decides_weights = True

    mode: Literal["packed", "document", "aligned"] = Field(
        "packed",
        description="packed cuts the token stream into windows; document cuts each document by "
        "itself; aligned starts each document on a segment boundary and resets the memory there.",
    )
    context_length: PositiveInt = Field(512, description="Tokens the model sees in one window.")
    remainder: Literal["drop", "pad"] = Field(
        "drop", description="document mode: what becomes of the tokens after the last full window."
    )
