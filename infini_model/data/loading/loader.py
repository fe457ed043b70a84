"""The data loader: batches of windows, in an order determined by a seed and a count.

The order is endless: position p is window π(p mod n) of epoch p // n, where π is a permutation
keyed by (seed, epoch). Of several sources, p and n count the windows of the one that a mixture
gives the position to. A global batch is the next batch_size × accumulation × processes positions,
and each process takes its share. So the loader's state is two integers, resuming is O(1), and any
number of processes sees the same global batches.

Windows may grow during a training, `packing.context_schedule`: a memory learns sooner from short
ones, and to keep what it holds from long ones. A phase has windows of one length, as many more of
them in a batch as they are shorter. It counts positions of its own, and its permutations are keyed
by (seed, phase, epoch). Where it begins is known beforehand, so the same two integers say which
phase it is and how many of its windows have been read.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch

from infini_model.config import PackingConfig, TrainingConfig
from infini_model.data.loading.mixture import Mixture, mix
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Batch, Windows
from infini_model.runtime.errors import DataError

# A permutation is hundreds of small operations, which are mostly overhead for so few positions.
POSITIONS_AT_ONCE = 1024
# Small batches are gathered together to amortize the cost of handing them over between threads.
TOKENS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Origin:
    """The position at which a branch continues the data of another run.

    Attributes:
        step: Optimizer steps taken before.
        windows_read: Windows of `packing.context_length` read before.
        first_key: The key of its first window, in `Batch.noise_keys`.
        taken: Positions read before of each source in each phase, [phases][sources]; empty is 0.
    """

    step: int = 0
    windows_read: int = 0
    first_key: int = 0
    taken: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Phase:
    """Windows of one length.

    Attributes:
        windows: The windows.
        first: Where it begins, in windows of `packing.context_length` read before.
        parts: How many of its windows have the tokens of one of these.
        first_key: The key of its first window, in `Batch.noise_keys`; those before it have
            smaller ones.
        weights: Those of the sources; None is by size.
        taken: See `Mixture.taken`.
    """

    windows: Windows
    first: int = 0
    parts: int = 1
    first_key: int = 0
    weights: Mapping[str, float] | None = None
    taken: Sequence[int] = ()

    @cached_property
    def mixture(self) -> Mixture:
        """The mixture of the sources. Raises `ConfigError` and `DataError` as `mix` does."""
        return replace(mix(self.windows, self.weights), taken=self.taken)


def make_phases(
    windows: Windows,
    config: PackingConfig,
    segment_length: int,
    training: TrainingConfig,
    *,
    global_batch: int,
    origin: Origin | None = None,
) -> Sequence[Phase]:
    """The phases of a training whose global batches have `global_batch` of `windows`.

    `windows` are those of `config`; the phases before the last cut the same tokens shorter. Of a
    branch none begins before its `origin`.
    """
    origin = origin or Origin()
    phases: list[Phase] = []
    schedule = (config.context_schedule or {}).items()
    lengths = {fraction: segments * segment_length for fraction, segments in schedule}
    for number, (fraction, length) in enumerate((lengths or {0.0: config.context_length}).items()):
        step = max(origin.step, math.ceil(fraction * training.total_steps))
        batches = training.batches_by(step) - training.batches_by(origin.step)
        first, key = origin.windows_read + batches * global_batch, origin.first_key
        if phases:
            before = phases[-1]
            key = before.first_key + (first - before.first) * before.parts
        cut, parts, weights = windows, config.context_length // length, config.weights_in(number)
        if parts > 1:
            shorter = config.updated(context_length=length)
            cut = replace(windows, packing=pack(windows.stream, shorter, segment_length))
        taken = origin.taken[number] if origin.taken else ()
        phases.append(Phase(cut, first, parts, key, weights, taken))
    return phases


def read_by_source(phases: Sequence[Phase], windows_read: int) -> list[list[int]]:
    """Count the positions of each source in each phase, [phases][sources], at `windows_read`.

    Those that a branch has from its parent are among them.
    """
    ends = [*(min(windows_read, phase.first) for phase in phases[1:]), windows_read]
    return [
        phase.mixture.read_in(max(0, end - phase.first) * phase.parts)
        for phase, end in zip(phases, ends, strict=True)
    ]


class Loader:
    """An endless iterator: `next()` returns this rank's micro-batches of the next global batch.

    `windows_read` counts the windows, over all ranks, in the batches returned so far: with it and
    the seed another loader resumes from there. With `phases`, whose last is of `windows`, shorter
    windows count by their tokens. `wait_seconds` is how long the last `next()` waited. A thread
    prefetches batches while the caller works; on CUDA it copies them to the device on a separate
    stream. `close()` stops it.

    Raises `DataError` if the split has fewer windows than one global batch; `next()` raises what
    `Windows.gather` does.
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
        windows_read: int = 0,
        device: torch.device | str = "cpu",
        tokens_at_once: int = TOKENS_AT_ONCE,
        phases: Sequence[Phase] = (),
    ) -> None:
        self.windows = windows
        self.phases = phases or [Phase(windows)]
        self.windows_read = windows_read
        self.wait_seconds = 0.0
        self.global_batch = batch_size * gradient_accumulation_steps * world_size
        window_tokens = windows.packing.row_length * windows.packing.rows_per_window
        if len(windows) < self.global_batch:
            raise DataError(
                f"too few tokens for one batch: {windows.name} has {len(windows)} windows of "
                f"{window_tokens} tokens, a global batch needs {self.global_batch}"
            )
        self._seed = seed
        self._rank_tokens = self.global_batch // world_size * window_tokens
        self._steps_at_once = max(1, tokens_at_once // self._rank_tokens)
        self._share = np.arange(self.global_batch).reshape(world_size, -1, batch_size)[rank]
        self._cached_numbers = windows_read, self._numbers_from(windows_read)
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._gathered = windows_read  # by the thread
        self._thread = ThreadPoolExecutor(1, "loader", initializer=self._use_device)
        self._ready: deque[list[Batch]] = deque()
        self._prefetched: Future[list[list[Batch]]] | None = None

    def _use_device(self) -> None:
        """A thread begins on GPU 0, where it would open a context of some hundred megabytes."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Batch]:
        began = time.perf_counter()
        if not self._ready:
            prefetched = self._prefetched = self._prefetched or self._thread.submit(self._gather)
            if prefetched.exception():
                # What failed is read again by the next call: nothing takes its place.
                self._prefetched = None
            self._ready.extend(prefetched.result())
            self._prefetched = self._thread.submit(self._gather)
        batches = self._ready.popleft()
        self._record_stream(batches)
        self.wait_seconds = time.perf_counter() - began
        self.windows_read += self.global_batch
        return batches

    def windows_at(self, windows_read: int) -> Windows:
        """The windows that the global batch after `windows_read` windows is of."""
        return self.phases[self._phase_at(windows_read)].windows

    def numbers(self, windows_read: int) -> np.ndarray:
        """The windows of this rank in the global batch after `windows_read` windows.

        [micro-batches, windows of one] int64.
        """
        first, cached = self._cached_numbers
        step, rest = divmod(windows_read - first, self.global_batch)
        if rest or not 0 <= step < len(cached):
            step, cached = 0, self._numbers_from(windows_read)
            # A single assignment, as both the loader's thread and the caller get here.
            self._cached_numbers = windows_read, cached
        numbers: np.ndarray = cached[step]
        return numbers

    def _numbers_from(self, windows_read: int) -> np.ndarray:
        """`numbers` of this global batch and the following ones of its phase, [steps, …]."""
        positions = self._positions(windows_read, max(1, POSITIONS_AT_ONCE // self._share.size))
        index = self._phase_at(windows_read)
        mixture = self.phases[index].mixture
        return mixture.windows_at(positions.reshape(-1), self._seed, index).reshape(positions.shape)

    def epochs(self, windows_read: int) -> dict[str, float]:
        """The passes over each source after `windows_read` windows, by its name."""
        epochs = dict.fromkeys(self.windows.sources, 0.0)
        read = read_by_source(self.phases, windows_read)
        for phase, counts in zip(self.phases, read, strict=True):
            for (name, part), count in zip(phase.windows.sources.items(), counts, strict=True):
                epochs[name] += count / max(1, len(part))
        return epochs

    def _phase_at(self, windows_read: int) -> int:
        """The number of the phase of the global batch after `windows_read` windows."""
        return bisect_right(self.phases, windows_read, key=lambda phase: phase.first) - 1

    def _positions(self, windows_read: int, most: int) -> np.ndarray:
        """This rank's positions in its phase of up to `most` global batches after `windows_read`.

        [steps, micro-batches, windows of one] int64; the steps end with the phase.
        """
        index = self._phase_at(windows_read)
        phase, steps = self.phases[index], most
        if index + 1 < len(self.phases):
            left = self.phases[index + 1].first - windows_read
            steps = min(most, max(1, left // self.global_batch))
        share = self._share[..., None] * phase.parts + np.arange(phase.parts)
        starts = (windows_read - phase.first + self.global_batch * np.arange(steps)) * phase.parts
        positions: np.ndarray = np.add.outer(starts, share.reshape(len(share), -1))
        return positions

    def _gather(self) -> list[list[Batch]]:
        """The micro-batches of the next few global batches."""
        phase = self.phases[self._phase_at(self._gathered)]
        positions = self._positions(self._gathered, self._steps_at_once)
        end = self._gathered + len(positions) * self.global_batch
        steps = range(self._gathered, end, self.global_batch)
        numbers = np.concatenate([self.numbers(step) for step in steps]).reshape(-1)
        together = phase.windows.gather(numbers, (phase.first_key + positions).reshape(-1))
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                # PyTorch's pinned allocator keeps the pinned copy alive until the transfer is done.
                together = together.pinned().to(self._device, non_blocking=True)
            self._stream.synchronize()
        micro_batches = len(self._share)
        tokens = together.tokens[..., 1:].numel()
        batches = together.chunk(tokens // self._rank_tokens * micro_batches)
        places = range(0, len(batches), micro_batches)
        self._gathered = end  # only now, so that what failed above is read again
        return [batches[first : first + micro_batches] for first in places]

    def _record_stream(self, batches: list[Batch]) -> None:
        """Tell the allocator that the caller's stream uses tensors of the loader's stream."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        for batch in batches:
            for tensor in batch:
                if tensor is not None:
                    tensor.record_stream(current)

    def close(self) -> None:
        """Stop the thread and discard prefetched batches."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()
        self._prefetched = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
