"""Trace a training step to its text: every window with its loss, shards and documents.

Computed only when something went wrong: the windows of the step are scored again one by one, with
the weights from before the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infini_model.data.loading.loader import Loader
from infini_model.data.loading.stream import Span
from infini_model.data.loading.windows import Batch, Windows
from infini_model.data.manifest import Split, read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.objectives.objective import Inputs
from infini_model.runtime.errors import DataError
from infini_model.training.replica import Replica

SPLIT: Split = "train"
# Limits for printing; the saved files are complete.
WINDOWS_SHOWN = 3
PASSAGES_SHOWN = 4
CHARACTERS_SHOWN = 160

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passage:
    """The part of a document that a window reads.

    Attributes:
        shard: File in the dataset folder.
        row: The document's row in that file.
        document: Its number in the split, as `datasets.load_from_disk` counts.
        first_token: Offset of the passage in the document, in tokens.
        tokens: Number of tokens, including the target of the last position.
        text: The decoded tokens.
    """

    shard: str
    row: int
    document: int
    first_token: int
    tokens: int
    text: str

    def __str__(self) -> str:
        shown = repr(self.text[:CHARACTERS_SHOWN])
        more = "…" if len(self.text) > CHARACTERS_SHOWN else ""
        place = f"tokens {self.first_token} to {self.first_token + self.tokens - 1}"
        return f"{self.shard}, row {self.row}, {place}: {shown}{more}"


@dataclass(frozen=True)
class WindowRead:
    """A window of a step.

    Attributes:
        window: Its number in the split.
        micro_batch: Index of its micro-batch in this process.
        row: Its row in the micro-batch.
        loss: Its mean loss before the step.
        passages: The passages it reads, in order.
    """

    window: int
    micro_batch: int
    row: int
    loss: float
    passages: list[Passage]

    def as_json(self) -> dict[str, Any]:
        """As a JSON tree; a loss that is not finite becomes a string, as JSON has no NaN."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else str(self.loss)}


class Attribution:
    """Traces the last batches of `loader` to their text; `replica` scores them."""

    def __init__(self, dataset_dir: Path, loader: Loader, replica: Replica) -> None:
        self._dataset_dir = dataset_dir
        self._loader = loader
        self._replica = replica

    def inputs(self, batches: Sequence[Batch]) -> list[Inputs]:
        """The model inputs of `batches`."""
        return [self._replica.objective.inputs(batch) for batch in batches]

    def read_back(self, batches: Sequence[Batch]) -> list[WindowRead]:
        """The windows of `batches`, this rank's share of the step, largest loss first.

        Scoring runs the model, so under FSDP all ranks must call this together.
        """
        losses = [self._losses(batch) for batch in batches]
        consumed = self._loader.consumed - self._loader.global_batch
        numbers, windows = self._loader.numbers(consumed), self._loader.windows_at(consumed)
        shards = read_manifest(self._dataset_dir).splits[SPLIT].shards
        files = [f"{SPLIT}/{shard.file}" for shard in shards]
        tokenizer = self._tokenizer()
        reads = [
            WindowRead(
                number, micro_batch, row, loss, self._passages(windows, number, files, tokenizer)
            )
            for micro_batch, share in enumerate(numbers.tolist())
            for row, (number, loss) in enumerate(zip(share, losses[micro_batch], strict=True))
        ]
        return sorted(reads, key=lambda read: -read.loss if math.isfinite(read.loss) else -math.inf)

    def _losses(self, batch: Batch) -> list[float]:
        """The mean loss of each window of `batch`."""
        windows = batch.chunk(len(batch.tokens))
        scores = [self._replica.score(window).sum(1).tolist() for window in windows]
        return [total / max(1.0, targets) for total, targets in scores]

    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_dataset_tokenizer(self._dataset_dir)
        except DataError as error:
            log.warning("%s; windows are listed without their text", error)
            return None

    def _passages(
        self, windows: Windows, window: int, files: Sequence[str], tokenizer: Tokenizer | None
    ) -> list[Passage]:
        stream = windows.stream

        def passage(span: Span) -> Passage:
            return Passage(
                shard=files[span.shard],
                row=span.row,
                document=span.document,
                first_token=span.first - span.start,
                tokens=span.last - span.first,
                text="" if tokenizer is None else tokenizer.decode(stream.tokens_of(span)),
            )

        return [passage(span) for span in windows.spans(window)]


def describe_windows(reads: Sequence[WindowRead]) -> list[str]:
    """The first few of `reads` as lines of text."""
    lines = []
    for read in reads[:WINDOWS_SHOWN]:
        place = f"micro-batch {read.micro_batch}, row {read.row}"
        lines.append(f"  • window {read.window} ({place}): loss {read.loss:.4f}")
        lines += [f"    {passage}" for passage in read.passages[:PASSAGES_SHOWN]]
        if more := len(read.passages[PASSAGES_SHOWN:]):
            lines.append(f"    … and {more} more documents")
    if more := len(reads[WINDOWS_SHOWN:]):
        lines.append(f"  … and {more} more windows")
    return lines
