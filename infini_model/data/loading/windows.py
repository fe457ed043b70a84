"""Windows of a token stream, read from its shards on demand.

A window is raw: rows of consecutive tokens. An objective (`infini_model.objectives`) turns it into
inputs and targets. Windows are read in the order of a keyed permutation of their numbers, of which
a validation takes a fixed sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import Packing, pack
from infini_model.data.loading.stream import TokenStream, open_split

# Rounds of the Feistel network.
ROUNDS = 6
GOLDEN = 0x9E3779B97F4A7C15
# Of the windows to score: not the run's seed, so that runs are compared on the same windows.
SAMPLE_SEED = 0


class Batch(NamedTuple):
    """A batch of windows of R rows of L positions: R is 1, or the number of segments if `aligned`.

    Attributes:
        tokens: int64 [B, R, L + 1], a row and the token after it; end-of-text past the document.
        valid: int64 [B, R], number of positions whose next token is in the row's own document; None
            if that is all L everywhere.
        document_starts: bool [B, T / segment_length], true where a segment starts a new document,
            or None.
        noise_keys: int64 [B], key of an objective's randomness, besides the seed: the window's
            position in the endless training order, or its number in the split.
        learnt: bool [B, R, L + 1], whether each token of a conversation is learned; None if
            documents are texts.
    """

    tokens: Tensor
    valid: Tensor | None
    document_starts: Tensor | None
    noise_keys: Tensor
    learnt: Tensor | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def chunk(self, count: int) -> list[Batch]:
        """`count` batches of equal size, as views: one operation a tensor, not one a batch."""
        parts = ((None,) * count if tensor is None else tensor.chunk(count) for tensor in self)
        return list(map(Batch._make, zip(*parts, strict=True)))

    def pinned(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch._make(None if tensor is None else change(tensor) for tensor in self)


@dataclass(frozen=True)
class Windows:
    """The windows of a split. `name` is for messages."""

    stream: TokenStream
    packing: Packing
    aligned: bool
    name: str

    def __len__(self) -> int:
        return self.packing.windows

    @property
    def sources(self) -> dict[str, range]:
        """The windows of each source; of one without a name, all under ""."""
        parts = map(range, self.packing.window_starts, self.packing.window_starts[1:])
        return dict(zip(self.stream.sources, parts, strict=True))

    def sample_sizes(self, max_windows: int | None) -> list[int]:
        """Count the windows of each source to score: as many of each that has them, or all."""
        counts = list(map(len, self.sources.values()))
        most = max(counts) if max_windows is None else max(1, max_windows // len(counts))
        return [min(count, most) for count in counts]

    def sample(self, max_windows: int | None) -> np.ndarray:
        """Numbers of the windows to score: `sample_windows` of each source, int64."""
        sizes = zip(self.sources.values(), self.sample_sizes(max_windows), strict=True)
        return np.concatenate([part.start + sample_windows(len(part), n) for part, n in sizes])

    def add_sources(self, totals: Tensor, max_windows: int | None) -> Tensor:
        """Add up what was summed over the sample of each source, [sources, …, S]: […, S].

        Each is weighted as all windows of its source, so that the mean loss is that of the split.
        """
        sizes = zip(self.sources.values(), self.sample_sizes(max_windows), strict=True)
        inverse = totals.new_tensor([len(part) / max(1, n) for part, n in sizes])
        # 1 for a single source, whose sums stay as they are.
        return (totals * (inverse / inverse.max())[:, None, None]).sum(0)

    def sum_by_source(self, scored: Tensor, batch: Batch) -> Tensor:
        """Sum what is scored of each window of a validation batch, [B, …]: [sources, …]."""
        totals = scored.new_zeros(len(self.packing.window_starts) - 1, *scored.shape[1:])
        ends = torch.tensor(self.packing.window_starts[1:])
        sources = torch.searchsorted(ends, batch.noise_keys.cpu(), right=True)
        return totals.index_add(0, sources.to(scored.device), scored)

    def gather(self, numbers: np.ndarray, keys: np.ndarray | None = None) -> Batch:
        """Read the windows with these numbers, int64 [B], in order.

        `keys` int64 [B] are for `Batch.noise_keys`; by default the numbers. Raises `IndexError` for
        a number out of range, `DataError` as `TokenStream`.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"{self.name}: has {len(self)} windows, asked for {numbers.max()}")
        rows, length = self.packing.locate(numbers), self.packing.row_length
        tokens = self.stream.gather(rows.starts, length + 1).astype(np.int64)
        short = np.flatnonzero(rows.valid < length)
        if len(short):
            closed = tokens[short]
            closed[np.arange(length + 1) > rows.valid[short, None]] = self.stream.eos_token_id
            tokens[short] = closed
        shape = (len(numbers), self.packing.rows_per_window)
        learnt = None
        if self.stream.conversations:
            learnt = self.stream.gather_learnt(rows.starts, length + 1)
        return Batch(
            torch.from_numpy(tokens.reshape(*shape, length + 1)),
            torch.from_numpy(rows.valid.reshape(shape)) if len(short) else None,
            torch.from_numpy(rows.first.reshape(shape)) if self.aligned else None,
            torch.from_numpy(numbers if keys is None else keys),
            None if learnt is None else torch.from_numpy(learnt.reshape(*shape, length + 1)),
        )

    def documents(self, numbers: np.ndarray) -> set[tuple[int, int]]:
        """The shard and row of each document in these windows."""
        rows = self.packing.locate(numbers)
        # With the last target of each row.
        stops = rows.starts + rows.valid + 1
        found: set[tuple[int, int]] = set()
        for start, stop in zip(rows.starts.tolist(), stops.tolist(), strict=True):
            found.update(self.stream.documents_between(start, stop))
        return found


def open_windows(
    dataset_dir: Path, split: str, config: PackingConfig, segment_length: int
) -> Windows:
    """The windows of a split of a dataset folder.

    Raises `DataError` if the folder is not a complete dataset.
    """
    stream = open_split(dataset_dir, split)
    packing = pack(stream, config, segment_length)
    return Windows(stream, packing, config.mode == "aligned", f"{dataset_dir}: split {split}")


def sample_windows(count: int, max_windows: int | None) -> np.ndarray:
    """Numbers of the windows to score out of `count`: int64, at most `max_windows`, all if None.

    The sample is spread over the whole split, and a larger sample contains the smaller ones.
    """
    size = count if max_windows is None else min(count, max_windows)
    positions = np.arange(size)
    if size == count:
        return positions
    return np.sort(permute(positions, count, SAMPLE_SEED, np.zeros_like(positions)))


def validation_batches(
    windows: Windows,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_windows: int | None = None,
) -> Iterator[Batch]:
    """This rank's batches of the sample; each window is in one batch of one rank.

    Every rank yields the same number of batches, as collective operations require; the last may be
    partial. A rank with no window left yields one without valid positions, which adds nothing to a
    sum over targets.
    """
    numbers = windows.sample(max_windows)
    together = batch_size * world_size
    steps = [numbers[start : start + together] for start in range(0, len(numbers), together)]
    shares = [step[rank * batch_size : (rank + 1) * batch_size] for step in steps]
    for step, mine in zip(steps, shares, strict=True):
        batch = windows.gather(mine if len(mine) else step[:1])
        if not len(mine):
            none = torch.zeros(batch.tokens.shape[:2], dtype=torch.int64)
            batch = batch._replace(valid=none)
        yield batch


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def permute(positions: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of `positions` (0 … size - 1) to its place in its epoch: int64, the same shape.

    A Feistel network is a bijection on 2b-bit numbers for any round function. Results of `size` or
    more are fed back in until they are below (cycle walking), which makes it a bijection on 0 …
    size - 1 in constant memory.

    `epochs` has the shape of `positions`. For a given seed and epoch the map is a bijection.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    key = _mix(
        _mix(np.full(1, seed % (1 << 64), np.uint64) + np.uint64(GOLDEN)) ^ epochs.astype(np.uint64)
    )
    values = positions.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        left, right = values[todo] >> half, values[todo] & low
        for turn in range(ROUNDS):
            salt = key[todo] + np.uint64((turn + 1) * GOLDEN % (1 << 64))
            left, right = right, left ^ (_mix(right + salt) & low)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= size]
    return values.astype(np.int64)
