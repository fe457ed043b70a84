"""Cache-sized chunks of segments and heads, for the CPU kernels.

An operator over a whole long sequence reads and writes every intermediate result in main memory, in
freshly mapped pages. That costs more than its arithmetic. So a kernel here finishes one
chunk before it starts the next, and reuses the same scratch memory for all of them. As many chunks
run at once as PyTorch has threads, since their operators are too short to be split over threads.
One thread computes a chunk, so results are the same to the bit every time.
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

from infini_model.model.kernels.numerics import memory_dtype

# Size limit of an intermediate result, so that a few fit in a core's L2 cache.
CHUNK_BYTES = 1 << 20

Chunk = tuple[slice, slice]


class _Scratch(threading.local):
    """Scratch buffers, separate for each thread."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_scratch = _Scratch()


def for_each_chunk(work: Callable[[Chunk], None], like: Tensor, heads: int, size: int) -> None:
    """Call `work` with slices of segments and heads that together cover each pair once.

    Args:
        work: Called from several threads at once, without gradients and without autocast.
        like: [N, …] for N segments; on a GPU all of them are one chunk.
        heads: Number of heads of each segment.
        size: Bytes of an intermediate result for one head of one segment.
    """
    segments = len(like)
    if like.device.type != "cpu":
        with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
            work((slice(segments), slice(heads)))
        return
    fit = max(1, CHUNK_BYTES // size)
    heads_at_once, segments_at_once = min(heads, fit), max(1, fit // heads)
    chunks = [
        (slice(segment, segment + segments_at_once), slice(head, head + heads_at_once))
        for segment in range(0, segments, segments_at_once)
        for head in range(0, heads, heads_at_once)
    ]
    threads = torch.get_num_threads()
    if threads == 1 or len(chunks) == 1:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for chunk in chunks:
                work(chunk)
        return
    inference = torch.is_inference_mode_enabled()

    def without_gradients(chunk: Chunk) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            work(chunk)

    for _ in _pool(threads).map(without_gradients, chunks):
        pass


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads in which PyTorch starts no further threads."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # initialises PyTorch's pool, which would reset the number later
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(threads, "infini-model", initializer=start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # for threads started later; this thread's was not changed
    return pool


# A forked process does not inherit the threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def scratch(name: str, like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory that this thread reuses for every tensor called `name`.

    On a GPU, where PyTorch keeps what is freed and chunks are large, it is new.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    key, size = (name, like.dtype, like.device), math.prod(shape)
    buffer = _scratch.buffers.get(key)
    if buffer is None or len(buffer) < size:
        with torch.inference_mode(False):  # inference tensors cannot be used outside that mode
            buffer = _scratch.buffers[key] = like.new_empty(size)
    return buffer[:size].view(shape)


def read_chunk(x: Tensor, chunk: Chunk, heads: int) -> Tensor:
    """A chunk of `x` [N, heads · G, L, D] as [n · h, G, L, D]; a view where possible."""
    return _by_heads(x, heads)[chunk].flatten(0, 1)


def chunk_rows(x: Tensor, chunk: Chunk, heads: int) -> Tensor:
    """A chunk of `x` [N, heads · G, L, D] in the memory's dtype, [M, G · L, D] for M memories."""
    return read_chunk(x, chunk, heads).flatten(1, 2).to(memory_dtype(x.dtype))


def write_chunk(out: Tensor, chunk: Chunk, heads: int, part: Tensor) -> None:
    """Copy `part` to the place that `read_chunk` reads."""
    place = _by_heads(out, heads)[chunk]
    place.copy_(part.view_as(place))


def _by_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.size(0), heads, -1, *x.shape[2:])
