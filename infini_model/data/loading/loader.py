"""Batches of windows, in an order that a seed and a count say in full.

The order never ends: position p is window π(p mod n) of epoch p // n, where π is a permutation
keyed by (seed, epoch). A global batch is the next batch_size × accumulation × processes positions,
and each process takes its part of them. So the state of the loader is two integers, resuming is
O(1), and any number of processes sees the same global batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import Cut, cut_stream
from infini_model.data.loading.permutation import permute
from infini_model.data.shards.stream import Span, TokenStream, open_split
from infini_model.runtime.errors import DataError

IGNORED = -100
# A permutation costs hundreds of small operations, as much for one position as for a thousand.
POSITIONS_AT_ONCE = 1024
# Small batches are gathered together: a thread that hands over each by itself does little else.
TOKENS_AT_ONCE = 1 << 17


class Batch(NamedTuple):
    """`input_ids` int64 [B, T]; `labels` int64 [B, T], the next token or -100 where none counts;
    `reset` bool [B, T / segment_length], true where a segment starts a new document, or None.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    reset: torch.Tensor | None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return Batch(
            self.input_ids.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            None if self.reset is None else self.reset.to(device, non_blocking=non_blocking),
        )

    def rows(self, first: int, last: int) -> Batch:
        """Some windows of the batch, not copied."""
        reset = None if self.reset is None else self.reset[first:last]
        return Batch(self.input_ids[first:last], self.labels[first:last], reset)

    def pinned(self) -> Batch:
        """The batch in page-locked memory, from which a GPU copies by itself."""
        return Batch(
            self.input_ids.pin_memory(),
            self.labels.pin_memory(),
            None if self.reset is None else self.reset.pin_memory(),
        )


@dataclass(frozen=True)
class Windows:
    """The windows of a split, read from its shards when asked for. `name` is for messages."""

    stream: TokenStream
    cut: Cut
    aligned: bool
    name: str

    def __len__(self) -> int:
        return self.cut.windows

    def gather(self, indices: np.ndarray) -> Batch:
        """The windows of these numbers, in their order. Raises `IndexError` for one not there."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"{self.name}: has {len(self)} windows, asked for {indices.max()}")
        rows = self.cut.locate(indices)
        length = self.cut.row_length
        tokens = self.stream.gather(rows.starts, length + 1)
        input_ids = tokens[:, :-1].astype(np.int64)
        labels = tokens[:, 1:].astype(np.int64)
        short = np.flatnonzero(rows.valid < length)
        if len(short):
            padding = np.arange(length) >= rows.valid[short, None]
            input_ids[short] = np.where(padding, self.stream.eos_token_id, input_ids[short])
            labels[short] = np.where(padding, IGNORED, labels[short])
        shape = (len(indices), self.cut.rows_per_window)
        reset = torch.from_numpy(rows.first.reshape(shape)) if self.aligned else None
        width = self.cut.rows_per_window * length
        return Batch(
            torch.from_numpy(input_ids.reshape(len(indices), width)),
            torch.from_numpy(labels.reshape(len(indices), width)),
            reset,
        )

    def spans(self, index: int) -> list[Span]:
        """Where in the shards the tokens of window `index` lie, its last label with them."""
        rows = self.cut.locate(np.array([index]))
        ranges: list[list[int]] = []
        for start, valid in zip(rows.starts.tolist(), rows.valid.tolist(), strict=True):
            # A row's last label is the first token of the next row of the same document.
            if ranges and start == ranges[-1][1] - 1:
                ranges[-1][1] = start + valid + 1
            else:
                ranges.append([start, start + valid + 1])
        return [span for start, stop in ranges for span in self.stream.spans(start, stop)]


def open_windows(
    dataset_dir: Path, split: str, packing: PackingConfig, segment_length: int
) -> Windows:
    """The windows of a split of a dataset folder.

    Raises `DataError` in one line where the folder is none or incomplete.
    """
    stream = open_split(dataset_dir, split)
    cut = cut_stream(stream.tokens, lambda: stream.document_offsets, packing, segment_length)
    return Windows(stream, cut, packing.mode == "aligned", f"{dataset_dir}: split {split}")


class Loader:
    """An endless iterator: `next()` is this rank's micro-batches of the next global batch.

    `consumed` counts the windows of all ranks in the batches that `next()` has returned: with it
    (and the seed) another loader goes on from there. `wait_seconds` is what the last `next()`
    waited. One thread gathers what comes next while the caller works; on CUDA it copies it to the
    device on a stream of its own. `close()` ends the thread.

    Raises `DataError` where the split has fewer windows than one global batch.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        consumed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.windows = windows
        self.consumed = consumed
        self.wait_seconds = 0.0
        self.global_batch = batch_size * gradient_accumulation_steps * world_size
        window_tokens = windows.cut.row_length * windows.cut.rows_per_window
        if len(windows) < self.global_batch:
            raise DataError(
                f"too few tokens for one batch: {windows.name} has {len(windows)} windows of "
                f"{window_tokens} tokens, a global batch needs {self.global_batch}"
            )
        self._seed = seed
        rank_tokens = self.global_batch // world_size * window_tokens
        self._steps_at_once = max(1, TOKENS_AT_ONCE // rank_tokens)
        self._share = np.arange(self.global_batch).reshape(world_size, -1, batch_size)[rank]
        self._known_shares = consumed, self._shares_from(consumed)
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ready: deque[list[Batch]] = deque()
        self._ahead: Future[list[list[Batch]]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Batch]:
        began = time.perf_counter()
        if not self._ready:
            ahead = self._ahead or self._thread.submit(self._gather, self.consumed)
            self._ready.extend(ahead.result())
            gathered = self.consumed + len(self._ready) * self.global_batch
            self._ahead = self._thread.submit(self._gather, gathered)
        batches = self._ready.popleft()
        self._hand_over(batches)
        self.wait_seconds = time.perf_counter() - began
        self.consumed += self.global_batch
        return batches

    def numbers(self, consumed: int) -> np.ndarray:
        """The windows of this rank in the global batch that `consumed` windows came before.

        [micro-batches, batch_size] int64.
        """
        first, shares = self._known_shares
        step, rest = divmod(consumed - first, self.global_batch)
        if rest or not 0 <= step < len(shares):
            step, shares = 0, self._shares_from(consumed)
            # In one assignment: the thread that gathers and the caller both ask.
            self._known_shares = consumed, shares
        numbers: np.ndarray = shares[step]
        return numbers

    def _shares_from(self, consumed: int) -> np.ndarray:
        """`numbers` of this global batch and of those that follow, [steps, …]."""
        steps = max(1, POSITIONS_AT_ONCE // self._share.size)
        starts = consumed + self.global_batch * np.arange(steps)
        positions = np.add.outer(starts, self._share)
        count, flat = len(self.windows), positions.reshape(-1)
        order = permute(flat % count, count, self._seed, flat // count)
        return order.reshape(positions.shape)

    def _gather(self, consumed: int) -> list[list[Batch]]:
        """The micro-batches of this global batch and of some that follow."""
        steps = range(self._steps_at_once)
        numbers = np.stack([self.numbers(consumed + step * self.global_batch) for step in steps])
        together = self.windows.gather(numbers.reshape(-1))
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                # The pinned copy outlives the transfer: PyTorch's pinned allocator sees to it.
                together = together.pinned().to(self._device, non_blocking=True)
            self._stream.synchronize()
        _, micro_batches, size = numbers.shape
        starts = np.arange(0, numbers.size, size).reshape(-1, micro_batches).tolist()
        return [[together.rows(first, first + size) for first in row] for row in starts]

    def _hand_over(self, batches: list[Batch]) -> None:
        """Tell the allocator that the caller's stream uses what the loader's stream made."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        for batch in batches:
            for tensor in batch:
                if tensor is not None:
                    tensor.record_stream(current)

    def close(self) -> None:
        """End the thread; what it has gathered ahead is thrown away."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def validation_batches(
    windows: Windows,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_windows: int | None = None,
) -> Iterator[Batch]:
    """This rank's batches of the first windows in order, each window in one rank's batch once.

    Batch i of all ranks together is windows i × G … (i + 1) × G - 1, G = batch_size × world_size,
    at most `max_windows` in all; the last may be partial. Every rank yields the same number of
    batches, as collective operations need: one for which no window is left yields a window whose
    labels are all masked, which adds nothing to a sum over labels.
    """
    together = batch_size * world_size
    count = len(windows)
    if max_windows is not None:
        count = min(count, max_windows)
    for start in range(0, count, together):
        mine = np.arange(start, min(start + together, count))
        mine = mine[rank * batch_size : (rank + 1) * batch_size]
        if len(mine):
            yield windows.gather(mine)
        else:
            spare = windows.gather(np.array([start]))
            yield spare._replace(labels=torch.full_like(spare.labels, IGNORED))
