"""Going through segments and heads in pieces that fit a cache, for the kernels of a CPU.

An operator that takes a long sequence as a whole reads every intermediate result from main memory
and writes it there, into pages that are mapped for it each time. Arithmetic is faster than that. So
a kernel here does all its work on a piece before it turns to the next, in memory that is used
anew for every piece, and as many pieces are under way as PyTorch has threads: its operators are
too short to be shared among threads. A piece is the work of one thread, so what comes out is the
same, bit for bit, every time.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# What an intermediate result may take of a core's second-level cache.
PIECE_BYTES = 1 << 20

Piece = tuple[slice, slice]


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_own = _Own()


def for_each_piece(work: Callable[[Piece], None], like: Tensor, heads: int, size: int) -> None:
    """Call `work` with slices of segments and of heads that cover each pair of them once.

    Args:
        work: Is called in several threads at once, without gradients and without autocast.
        like: [N, …] for N segments; on a GPU all of them are one piece.
        heads: Number of heads of each segment.
        size: Bytes of an intermediate result for one head of one segment.
    """
    segments = len(like)
    if like.device.type != "cpu":
        with torch.no_grad():
            work((slice(segments), slice(heads)))
        return
    fit = max(1, PIECE_BYTES // size)
    heads_at_once, segments_at_once = min(heads, fit), max(1, fit // heads)
    pieces = [
        (slice(segment, segment + segments_at_once), slice(head, head + heads_at_once))
        for segment in range(0, segments, segments_at_once)
        for head in range(0, heads, heads_at_once)
    ]
    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) == 1:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for piece in pieces:
                work(piece)
        return
    inference = torch.is_inference_mode_enabled()

    def quietly(piece: Piece) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            work(piece)

    for _ in _pool(threads).map(quietly, pieces):
        pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads in each of which PyTorch uses that one alone."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # settles what would otherwise be settled, and undone, later
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "infini-model", initializer=start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # for threads that start later; this one's was never changed
    return pool


# A forked process has none of the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def scratch(name: str, like: Tensor, *shape: int) -> Tensor:
    """Memory of this thread for `name`, of arbitrary content; the tensor before is overwritten."""
    key, size = (name, like.dtype, like.device), math.prod(shape)
    held = _own.memory.get(key)
    if held is None or len(held) < size:
        with torch.inference_mode(False):  # what is made under it cannot be used outside
            held = _own.memory[key] = like.new_empty(size)
    return held[:size].view(shape)


def take(x: Tensor, piece: Piece, heads: int) -> Tensor:
    """A piece of `x` [N, heads · G, L, D] as [n · h, G, L, D], a copy where it must be one."""
    return _by_heads(x, heads)[piece].flatten(0, 1)


def put(out: Tensor, piece: Piece, heads: int, part: Tensor) -> None:
    """Copy `part` to where `take` would take it from."""
    place = _by_heads(out, heads)[piece]
    place.copy_(part.view_as(place))


def _by_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.size(0), heads, -1, *x.shape[2:])
