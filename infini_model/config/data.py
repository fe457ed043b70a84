"""Settings from text to training windows: the sections `data` and `packing`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    Tag,
    model_validator,
)

from infini_model.config.locations import Place
from infini_model.config.section import (
    MOST,
    Fraction,
    Name,
    NonEmpty,
    NonEmptyList,
    NonNegativeInt,
    PositiveInt,
    Schedule,
    Section,
    takes,
)

MEBIBYTE = 1 << 20

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
Device = Annotated[str, takes("auto, cpu, cuda or cuda:N", DEVICE.fullmatch)]
# CPUs or GPUs of a task.
Units = Annotated[
    PositiveFloat,
    takes(
        "a fraction of 1 or a whole number, as Ray does",
        lambda units: units < 1 or units.is_integer(),
    ),
]


Template = Annotated[str, takes("a Jinja template", lambda value: "{{" in value or "{%" in value)]
# Keys and kinds of a source, for which a source of that name would be taken.
RESERVED = frozenset({"kind", "paths", "repository", "files", "hub"})


def _listed(value: Any) -> Any:
    """A single glob or weight as a list of one."""
    return [value] if isinstance(value, str | float | int) else value


FilterName: TypeAlias = Literal[
    "GopherQualityFilter", "GopherRepetitionFilter", "FineWebQualityFilter", "C4QualityFilter"
]


FilterArgument: TypeAlias = Annotated[int, Field(ge=-1, le=MOST)] | float | bool | list[str] | None


class MinHashConfig(Section):
    """Near-duplicates by MinHash: one of those whose sets of words resemble each other is kept."""

    n_grams: PositiveInt = 5
    """Consecutive words that are compared."""
    num_buckets: PositiveInt = 14
    """Groups of hashes; two documents resemble each other if all hashes of a group agree. With the
    defaults that is likely from 72% of common n-grams on."""
    hashes_per_bucket: PositiveInt = 8
    """Hashes in a group."""


class ScreenConfig(Section):
    """Documents to leave out by their quality, and near-duplicates; by datatrove."""

    filters: dict[FilterName, dict[str, FilterArgument]] = {}
    """Filters of datatrove in the order in which they run, each with its own arguments, such as
    {GopherQualityFilter: {min_doc_words: 30}}; C4QualityFilter drops lines, too."""
    minhash: MinHashConfig | None = MinHashConfig()
    """Removal of near-duplicates within the source; null keeps them."""
    language: NonEmpty = "eng_Latn"
    """Language whose rules separate words, by its name in datatrove."""


class BaseSource(Section):
    """Settings that sources of all kinds have."""

    kind: str
    column: str = "text"
    """Column that holds the text, in files of rows."""
    min_characters: NonNegativeInt = 0
    """Shortest document to keep, in characters; 0 drops empty documents only."""
    pairs: bool = False
    """Whether each row is a conversation, instead of a text: messages or conversations, a list of
    objects with role and content, or a question and its answer, in columns of usual names such as
    instruction, input and output."""
    learn: Literal["all", "last"] = "all"
    """What of a conversation is learned, if data.source.pairs: all messages of the assistant, or
    the last one alone."""
    columns: Annotated[list[NonEmpty], Field(max_length=2)] = []
    """Names of the columns of conversations, if data.source.pairs: that of the messages, or those
    of the question and the answer. Empty (default) are the usual ones."""
    template: Template | None = None
    """How messages become text, if data.source.pairs: a program in Jinja, as in
    chat_template.jinja. null (default) is the chat template of the tokenizer or, if it has none,
    for each message its role, a colon, a new line and its content."""
    screen: ScreenConfig | None = None
    """Screening of the texts by quality filters, and for near-duplicates, before they are
    tokenised; {} is near-duplicates alone, null (default) nothing."""

    def conflicts(self) -> Iterator[str]:
        if self.pairs and self.screen is not None:
            yield "screen takes texts; leave it out beside pairs"


class FilesSource(BaseSource):
    """Text files. Local files are read in place, remote files are downloaded first."""

    kind: Literal["files"] = "files"
    """files, or hub, a dataset on the Hugging Face Hub; by default the kind that has the given
    keys."""
    paths: Annotated[NonEmptyList[str], BeforeValidator(_listed)] = ["{stdlib}/**/*.py"]
    """Globs or URLs (http, https, s3, gs, az); {stdlib} is the folder of Python's standard library.
    Texts (.txt, .md, .rst, .tex, source code) hold one document each; .jsonl, .json, .csv, .tsv and
    .parquet files hold one per row. All but the last may also be compressed (.gz, .zst)."""
    format: Literal["text", "jsonl", "json", "csv", "tsv", "parquet"] | None = None
    """Format of all files, whatever their suffixes; null (default) is what the suffixes say."""
    errors: Literal["fail", "skip", "replace"] = "fail"
    """What to do with a document that is not valid UTF-8: fail stops and names it, skip leaves it
    out, replace substitutes U+FFFD for the invalid bytes."""
    separator: NonEmpty | None = None
    """Text that separates the documents in a file of text, such as a blank line; null (default)
    reads each file as one document."""


class HubSource(BaseSource):
    """Dataset on the Hugging Face Hub, read at a pinned commit."""

    kind: Literal["hub"] = "hub"
    repository: str
    """Name on the Hub, such as ccdv/arxiv-summarization."""
    configuration: str | None = None
    """Configuration (subset) of the dataset; null uses its default one."""
    split: str = "train"
    """Split of the Hub dataset to read; or several, such as train+test, or all."""
    revision: str | None = None
    """Commit, tag or branch, resolved to a commit when the download starts; null uses the default
    branch, the one of which the Hub keeps a Parquet copy."""
    limit: Annotated[int, Field(gt=0, le=10**12)] | None = None
    """Rows to read, before min_characters drops any; null reads all."""


def source_kind(value: Any) -> Any:
    """Kind of source that `value`, a `Source` or a mapping, describes; None if it has none."""
    if isinstance(value, Mapping):
        return value.get("kind", "hub" if "repository" in value else "files")
    return getattr(value, "kind", None)


Source = Annotated[
    Annotated[FilesSource, Tag("files")] | Annotated[HubSource, Tag("hub")],
    Discriminator(source_kind),
]


class TokenizerConfig(Section):
    """Tokenizer: how text becomes token ids."""

    spec: NonEmpty = "bytes"
    """bytes (each UTF-8 byte is a token), train (train a byte-level BPE on the corpus), model (that
    of model.initial_weights), a path to a tokenizer.json, or the name of a tokenizer on the Hub,
    optionally with @revision."""
    eos_token: NonEmpty | None = None
    """Token that ends every document; null (default) is the one that the tokenizer's files state,
    or a special token that is known to end a text, such as <|endoftext|>."""
    vocab_size: Annotated[int, Field(ge=257, le=1 << 24)] = 4096
    """Vocabulary size of the tokenizer that spec=train trains; datasets of the same data.name and
    vocabulary size keep the one that was trained first."""


class SplitsConfig(Section):
    """Fraction of the documents in each split; a hash of its content assigns each document."""

    train: Fraction = 0.9
    """Fraction of the documents to train on."""
    validation: Fraction = 0.05
    """Fraction of the documents to validate on."""
    test: Fraction = 0.05
    """Fraction of the documents held out for the final test."""

    def conflicts(self) -> Iterator[str]:
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            yield f"train + validation + test must be 1, not {total:g}"
        if self.train == 0.0:
            yield "train must be more than 0"


class DataConfig(Section):
    """Dataset: its source, tokenizer and splits."""

    name: Name = "corpus"
    """Prefix of the dataset folder's name; a content key is appended."""
    source: Source | None = FilesSource(errors="skip")
    """Origin of the text; null if data.sources has several."""
    sources: dict[Name, Source] | None = None
    """Sources by name, such as {web: {paths: …}, code: {repository: …}}, each with the keys of
    data.source, in place of that. They share the tokenizer and the splits; packing.weights mixes
    them. null (default) is the one data.source."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    splits: SplitsConfig = SplitsConfig()
    folder: Place | None = None
    """Finished dataset to use: its name, with or without the key, its folder or address (s3://,
    gs:// or az://), or an output folder, of which the newest is used; null builds the dataset from
    source, or reuses it if it exists."""
    keep: PositiveInt | None = None
    """Datasets of this name to keep, those used last; at its end, preprocess removes the others
    that no run refers to, and what only they needed. null (default) removes nothing."""
    partition_megabytes: PositiveInt = 32
    """Size of a partition, in MiB of text. A partition, a range of a large file or several small
    files, is the unit of parallel work and of reuse."""
    engine: Literal["local", "ray"] = "local"
    """Where partitions are made: local is threads of this machine, ray the nodes of the Ray cluster
    that this machine is a node of, one task per partition."""
    ray_cpus: Units = 1.0
    """CPUs that a task on Ray reserves."""
    ray_gpus: Units = 1.0
    """GPUs that a task on Ray reserves if data.device is cuda; with 0.5, two tasks share one."""
    ray_memory_gigabytes: PositiveFloat | None = None
    """Memory that a task on Ray reserves, in GB; null (default) is none."""
    workers: NonNegativeInt = 0
    """Threads that read and tokenise, each a partition; 0 (default) is one per available core, plus
    one. With 1 nothing else is used; otherwise the last partition has all cores."""
    device: Device = "auto"
    """Where text is encoded: cpu (auto is the same), cuda (all GPUs) or cuda:N (one GPU). The
    threads read, split and write in any case, and the tokens are identical."""

    @model_validator(mode="before")
    @classmethod
    def _sources_replace_the_default(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("sources") is not None:
            return {"source": None, **values}
        return values

    @property
    def named_sources(self) -> dict[str, Source]:
        """The sources in the order of their names; one without a name is called ""."""
        return {"": self.source} if self.source else dict(sorted((self.sources or {}).items()))

    def conflicts(self) -> Iterator[str]:
        if self.source and self.sources is not None:
            yield "sources is given beside data.source; leave one of them out"
        if not self.named_sources:
            yield "sources is empty; name a source, or set data.source"
        for name in sorted(RESERVED & self.named_sources.keys()):
            yield f"sources.{name} is a reserved name; choose another"
        templates = {each.template for each in self.named_sources.values() if each.pairs}
        if len(templates) > 1:
            yield "the conversations of all sources take one form; give them the same template"
        if self.engine == "ray" and self.device not in ("auto", "cpu", "cuda"):
            yield f"device {self.device} needs engine=local; Ray takes cpu or cuda"


def _multiples(schedule: dict[float, int]) -> dict[float, int]:
    for shorter, longer in itertools.pairwise(schedule.values()):
        if longer % shorter:
            raise ValueError(f"{longer} segments are not a multiple of the {shorter} before")
    return schedule


ContextSchedule = Annotated[Schedule, AfterValidator(_multiples)]


Weight = Annotated[float, Field(ge=0.0, le=MOST)]
Weights = Annotated[
    NonEmptyList[Weight],
    BeforeValidator(_listed, json_schema_input_type=Weight | NonEmptyList[Weight]),
]
Remainder: TypeAlias = Literal["share", "pad", "drop"]


class PackingConfig(Section):
    """How the token stream is cut into windows; changing it needs no new tokenisation."""

    mode: Literal["packed", "document", "aligned"] = "packed"
    """packed cuts the token stream into windows that may span documents; document begins each
    document in a window of its own; aligned begins it on a segment boundary and resets the memory
    there. packing.remainder lets short documents share."""
    context_length: PositiveInt = 512
    """Tokens in one window; a multiple of model.segment_length."""
    context_schedule: ContextSchedule | None = None
    """Segments of a training window from a fraction of the steps on, such as {0: 2, 0.25: 8, 0.5:
    32}: a memory learns sooner from short windows, and to last from long ones. Each divides the
    next, and the last makes packing.context_length. A step has as many tokens throughout. null
    (default) has windows of context_length from the start."""
    weights: dict[Name, Weights] | None = None
    """Share of the windows that each of data.sources gets, in any unit, such as {web: 7, code: 3};
    or a list with one for each phase of packing.context_schedule. null (default) is by size: all
    windows once an epoch."""
    max_epochs: dict[Name, PositiveFloat] | None = None
    """Passes over a source, such as {code: 4}, beyond which a training does not start. null
    (default) is no limit; from 4 on a warning says so."""
    remainder: Remainder = "share"
    """The rest of the window (document) or segment (aligned) in which a document ends: share it
    with the next documents that fit in whole and see each other there, pad it, or drop what does
    not fill one."""

    def weights_in(self, phase: int) -> dict[str, float] | None:
        """The weights in a phase of the schedule, from 0."""
        if self.weights is None:
            return None
        return {name: each[min(phase, len(each) - 1)] for name, each in self.weights.items()}
