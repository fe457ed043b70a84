"""Windows of a token stream, read from its shards on demand.

A window is raw: rows of consecutive tokens. An objective (`infini_model.objectives`) turns it into
inputs and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import Packing, Rows, pack
from infini_model.data.loading.pairs import PairPacking, check_pair_packing
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
        prompts: int64 [B, 1], number of tokens at the start of the row that are a prompt; None if
            documents have no prompts.
    """

    tokens: Tensor
    valid: Tensor | None
    reset: Tensor | None
    keys: Tensor
    prompts: Tensor | None = None

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
                nothing if self.prompts is None else self.prompts.chunk(count),
            )
        )

    def pinned(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tokens, valid, reset, keys, prompts = self
        return Batch(
            change(tokens),
            None if valid is None else change(valid),
            None if reset is None else change(reset),
            change(keys),
            None if prompts is None else change(prompts),
        )


@dataclass(frozen=True)
class Windows:
    """The windows of a split. `name` is for messages.

    `pairs` is the packing where documents are prompts and answers, else None.
    """

    stream: TokenStream
    packing: Packing
    aligned: bool
    name: str
    pairs: PairPacking | None = None

    def __len__(self) -> int:
        return self.packing.windows

    def gather(self, numbers: np.ndarray, keys: np.ndarray | None = None) -> Batch:
        """Read the windows with these numbers, in order.

        Args:
            numbers: int64 [B].
            keys: int64 [B], for `Batch.keys`; by default the numbers.

        Raises:
            IndexError: A number is out of range.
            DataError: A shard is missing, damaged, or not the one in the manifest.
            UnreachableError: A store that has shards does not answer.
        """
        return self.begin(numbers, keys)()

    def begin(
        self, numbers: np.ndarray, keys: np.ndarray | None = None, pool: Executor | None = None
    ) -> Callable[[], Batch]:
        """Begin what `gather` does; the result finishes it.

        Shards that are elsewhere are read by the threads of `pool`, or before this returns.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"{self.name}: has {len(self)} windows, asked for {numbers.max()}")
        rows = self.packing.locate(numbers)
        tokens = self.stream.begin(rows.starts, self.packing.row_length + 1, pool)
        return partial(self._batch, numbers, numbers if keys is None else keys, rows, tokens)

    def _batch(
        self,
        numbers: np.ndarray,
        keys: np.ndarray,
        rows: Rows,
        read_tokens: Callable[[], np.ndarray],
    ) -> Batch:
        length = self.packing.row_length
        tokens = read_tokens().astype(np.int64)
        short = np.flatnonzero(rows.valid < length)
        if len(short):
            closed = tokens[short]
            closed[np.arange(length + 1) > rows.valid[short, None]] = self.stream.eos_token_id
            tokens[short] = closed
        shape = (len(numbers), self.packing.rows_per_window)
        return Batch(
            torch.from_numpy(tokens.reshape(*shape, length + 1)),
            torch.from_numpy(rows.valid.reshape(shape)) if len(short) else None,
            torch.from_numpy(rows.first.reshape(shape)) if self.aligned else None,
            torch.from_numpy(keys),
            None if self.pairs is None else torch.from_numpy(self.pairs.prompts[numbers, None]),
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

    Raises `DataError` if the folder is not a complete dataset, `ConfigError` if its documents are
    prompts and answers and `config` has another mode for them, `UnreachableError` if a store that
    has shards does not answer.
    """
    stream = open_split(dataset_dir, split)
    if stream.pairs:
        check_pair_packing(config, dataset_dir)
    if config.mode != "packed":
        # Every window is found by the documents around it.
        stream.shards.keep_offsets()
    name = f"{dataset_dir}: split {split}"
    if stream.pairs:
        pairs = PairPacking(stream.lengths(), stream.shards.prompts(), config.context_length)
        return Windows(stream, pairs, aligned=False, name=name, pairs=pairs)
    packing = pack(stream, config, segment_length)
    return Windows(stream, packing, config.mode == "aligned", name)
