"""Windows of a token stream, read from its shards on demand.

A window is raw: rows of consecutive tokens. An objective (`infini_model.objectives`) turns it into
inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import Packing, pack
from infini_model.data.shards.stream import Span, TokenStream, open_split


class Batch(NamedTuple):
    """A batch of windows of R rows of L positions: R is 1, or the number of segments if `aligned`.

    Attributes:
        tokens: int64 [B, R, L + 1], a row and the token after it; end-of-text past the document.
        valid: int64 [B, R], number of positions whose next token is in the row's own document; None
            if that is all L everywhere.
        reset: bool [B, T / segment_length], true where a segment starts a new document, or None.
        keys: int64 [B], key of an objective's randomness, besides the seed: the window's position
            in the endless training order, or its number in the split.
    """

    tokens: Tensor
    valid: Tensor | None
    reset: Tensor | None
    keys: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def chunk(self, count: int) -> list[Batch]:
        """`count` batches of equal size, as views: one operation a tensor, not one a batch."""
        nothing = (None,) * count
        return list(
            map(
                Batch,
                self.tokens.chunk(count),
                nothing if self.valid is None else self.valid.chunk(count),
                nothing if self.reset is None else self.reset.chunk(count),
                self.keys.chunk(count),
            )
        )

    def pinned(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tokens, valid, reset, keys = self
        return Batch(
            change(tokens),
            None if valid is None else change(valid),
            None if reset is None else change(reset),
            change(keys),
        )


@dataclass(frozen=True)
class Windows:
    """The windows of a split. `name` is for messages."""

    stream: TokenStream
    packing: Packing
    aligned: bool
    name: str

    def __len__(self) -> int:
        return self.packing.windows

    def gather(self, numbers: np.ndarray, keys: np.ndarray | None = None) -> Batch:
        """Read the windows with these numbers, in order.

        Args:
            numbers: int64 [B].
            keys: int64 [B], for `Batch.keys`; by default the numbers.

        Raises:
            IndexError: A number is out of range.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"{self.name}: has {len(self)} windows, asked for {numbers.max()}")
        rows = self.packing.locate(numbers)
        length = self.packing.row_length
        tokens = self.stream.gather(rows.starts, length + 1).astype(np.int64)
        short = np.flatnonzero(rows.valid < length)
        if len(short):
            beyond = np.arange(length + 1) > rows.valid[short, None]
            tokens[short] = np.where(beyond, self.stream.eos_token_id, tokens[short])
        shape = (len(numbers), self.packing.rows_per_window)
        return Batch(
            torch.from_numpy(tokens.reshape(*shape, length + 1)),
            torch.from_numpy(rows.valid.reshape(shape)) if len(short) else None,
            torch.from_numpy(rows.first.reshape(shape)) if self.aligned else None,
            torch.from_numpy(numbers if keys is None else keys),
        )

    def spans(self, number: int) -> list[Span]:
        """Where the tokens of window `number`, including each row's last target, are stored."""
        rows = self.packing.locate(np.array([number]))
        ranges: list[list[int]] = []
        for start, valid in zip(rows.starts.tolist(), rows.valid.tolist(), strict=True):
            # The last token of a row is the first of the next row of the same document.
            if ranges and start == ranges[-1][1] - 1:
                ranges[-1][1] = start + valid + 1
            else:
                ranges.append([start, start + valid + 1])
        return [span for start, stop in ranges for span in self.stream.spans(start, stop)]


def open_windows(
    dataset_dir: Path, split: str, config: PackingConfig, segment_length: int
) -> Windows:
    """The windows of a split of a dataset folder.

    Raises `DataError` if the folder is not a complete dataset.
    """
    stream = open_split(dataset_dir, split)
    packing = pack(stream.tokens, lambda: stream.document_offsets, config, segment_length)
    return Windows(stream, packing, config.mode == "aligned", f"{dataset_dir}: split {split}")
