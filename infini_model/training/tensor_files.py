"""Safetensors files that several ranks write together, each the rows of the tensors that it holds.

The tensors are whole in the files, so that any number of ranks reads them again, and any program.
Rank 0 lays the files out. Each rank then writes its rows to where they belong, if it sees the
folder; the others send theirs to rank 0, which writes them one after another. So no rank ever holds
more than its own rows and one tensor of another's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import named_os_errors, sha256
from infini_model.training.distributed import World

T = TypeVar("T")
# For each file of a folder the tensors in it, by name, and at which byte each begins.
Places = Mapping[str, list[tuple[str, int]]]

# Safetensors' names of the types of weights and moments.
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}


class Rows(NamedTuple):
    """A rank's part of a tensor: consecutive rows, or none.

    Attributes:
        values: [rows, ...] on the CPU; [] of a tensor without dimensions.
        first: Which row of the whole the first one is.
        shape: Of the whole.
    """

    values: Tensor
    first: int
    shape: torch.Size

    @property
    def offset(self) -> int:
        """Bytes of the tensor before these rows."""
        return self.first * math.prod(self.shape[1:]) * self.values.itemsize

    def like_whole(self) -> Tensor:
        """The whole tensor without memory, on `meta`."""
        return torch.empty(self.shape, dtype=self.values.dtype, device="meta")


def lay_out(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Make a safetensors file for `tensors`, on any device, that has zeros in place of them.

    Returns the byte at which each begins. Raises `OSError`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = dict[str, int](), 0
    # The widest first, so that all are aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        places[name], end = end, end + tensor.nbytes
        offsets = {"data_offsets": [places[name], end]}
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], **offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + end)
    return {name: start + place for name, place in places.items()}


def write_together(
    world: World, target: Path, folder: Path, places: Places, rows: Mapping[str, Rows]
) -> dict[str, str]:
    """Write what all ranks hold to the files of `folder`, to become `target`, and flush it to disk.

    Call it on all ranks, with the same `places` and names of `rows`. Returns the SHA-256 of each
    file, on all ranks. Raises `UserError` on all ranks if one of them cannot write.
    """

    def write() -> bool:
        # Its name has something random in it, so another folder cannot be mistaken for it.
        if is_here := folder.is_dir():
            _write(folder, places, rows)
        return is_here

    sees = together(world, target, write)
    readers = [rank for rank, is_there in enumerate(sees) if is_there]

    def relay() -> None:
        errors = list[OSError]()
        for source in range(world.size):
            if source not in readers and world.rank in (0, source):
                errors += _relay(world, source, folder, places, rows)
        if errors:
            raise errors[0]

    together(world, target, relay)

    def hash_own() -> dict[str, str]:
        if world.rank not in readers:
            return {}
        own = list(places)[readers.index(world.rank) :: len(readers)]
        return {name: sha256(folder / name) for name in own}

    found = together(world, target, hash_own)
    return {name: checksum for each in found for name, checksum in each.items()}


def _write(folder: Path, places: Places, every: Mapping[str, Rows]) -> None:
    for name, tensors in places.items():
        # Only for writing: NFS then sends just these bytes, and nothing of what others write.
        with os.fdopen(os.open(folder / name, os.O_WRONLY), "wb") as file:
            for tensor, start in tensors:
                rows = every[tensor]
                file.seek(start + rows.offset)
                file.write(rows.values.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())


def _relay(
    world: World, source: int, folder: Path, places: Places, rows: Mapping[str, Rows]
) -> list[OSError]:
    """Send the rows of rank `source` to rank 0, which writes them. Call it on these two ranks.

    Returns an error of rank 0, which receives the rest nevertheless: the other waits for that.
    """
    sizes = torch.zeros(len(rows), 2, dtype=torch.int64)
    if not world.is_main:
        sizes = torch.tensor([[each.first, len(each.values)] for each in rows.values()])
    found = dict(zip(rows, world.send_to_main(sizes, source).tolist(), strict=True))
    errors = list[OSError]()
    for name, tensors in places.items():
        for tensor, start in tensors:
            (first, count), own = found[tensor], rows[tensor]
            values = own.values.new_empty(count, *own.shape[1:]) if world.is_main else own.values
            if count:
                world.send_to_main(values, source)
            if world.is_main and not errors:
                received = Rows(values, first, own.shape)
                try:
                    _write(folder, {name: [(tensor, start)]}, {tensor: received})
                except OSError as error:
                    errors.append(error)
    return errors


def together(world: World, path: Path, work: Callable[[], T]) -> list[T]:
    """Do `work`, which returns JSON, on all ranks; return what it returns on each.

    Raises the `UserError` of a rank on all of them, as where `path` cannot be written.
    """
    result, error = None, None
    try:
        with named_os_errors(path):
            result = work()
    except UserError as caught:
        error = caught
    said = world.all_gather_text(json.dumps([result, error and str(error)]))
    if error is not None:
        raise error
    results, problems = zip(*map(json.loads, said), strict=True)
    for problem in filter(None, problems):
        raise UserError(problem)
    return [*results]
