"""Who makes the partitions: an engine runs `make_partition` for each spec, wherever it likes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from infini_model.config import DataConfig
from infini_model.data.shards.partition_store import PartitionStore
from infini_model.data.shards.partitions import PartitionSpec
from infini_model.data.shards.workers import worker_devices
from infini_model.data.threads import Advance, Worker, for_each
from infini_model.data.tokenizers.load import on_device
from infini_model.data.tokenizers.tokenizer import Tokenizer


class Engine(Protocol):
    """Makes partitions; nothing of them is returned, since the store has it."""

    def make(self, specs: Sequence[PartitionSpec], store: PartitionStore, advance: Advance) -> None:
        """Make the partitions of `specs` in `store`; `advance` receives bytes of text.

        Raises the first error, once no more work is under way; finished partitions are kept.
        """


def make_engine(config: DataConfig, tokenizer: Tokenizer) -> Engine:
    """The engine that `data.engine` names."""
    if config.engine == "local":
        return LocalEngine(config, tokenizer)
    from infini_model.data.shards.on_ray.engine import RayEngine

    return RayEngine(config, tokenizer)


class LocalEngine:
    """One thread per core or GPU, all taking partitions from one queue, the largest first."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    def make(self, specs: Sequence[PartitionSpec], store: PartitionStore, advance: Advance) -> None:
        """Make the partitions with no more threads than there are partitions."""

        def one(tokenizer: Tokenizer, spec: PartitionSpec, advance: Advance) -> None:
            left = spec.bytes

            def limited(count: int) -> None:
                nonlocal left
                done = min(count, left)
                left -= done
                advance(done)

            store.make(spec, tokenizer, limited)
            advance(left)

        devices = worker_devices(self._config, self._tokenizer)[: len(specs)]
        workers: list[Worker[PartitionSpec]] = [
            partial(one, on_device(self._tokenizer, device)) for device in devices
        ]
        for_each(sorted(specs, key=lambda spec: -spec.bytes), workers, advance)
