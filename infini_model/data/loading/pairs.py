"""Windows of prompts and answers: each pair by itself, from its first token on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import Rows
from infini_model.runtime.errors import ConfigError


class PairPacking:
    """Windows of a pair each, which is cut or padded to `row_length`.

    A pair without a token of its answer within the row has no window. `skipped` counts those, `cut`
    the windows in which the answer does not end. `prompts` int64 [windows] is the number of tokens
    of the prompt of each.
    """

    rows_per_window = 1

    def __init__(
        self, lengths: Iterable[np.ndarray], prompts: Iterable[np.ndarray], row_length: int
    ) -> None:
        """`lengths` and `prompts` count the tokens of all pairs and of their prompts, in order."""
        sizes = np.concatenate([np.zeros(0, np.int32), *lengths]).astype(np.int64)
        before = np.concatenate([np.zeros(0, np.int32), *prompts]).astype(np.int64)
        kept = np.flatnonzero(before < row_length)
        self.row_length = row_length
        self.windows = len(kept)
        self.skipped = len(sizes) - len(kept)
        self.cut = int((sizes[kept] > row_length + 1).sum())
        self._starts = (np.cumsum(sizes) - sizes)[kept]
        self._valid = np.minimum(sizes[kept] - 1, row_length)
        self.prompts = before[kept]

    def locate(self, windows: np.ndarray) -> Rows:
        """Row w starts with its pair."""
        valid = self._valid[windows]
        return Rows(self._starts[windows], valid, np.ones(len(valid), bool))

    @property
    def shortfall(self) -> str | None:
        """What does not fit into the windows, in words; None if everything does."""
        if not self.skipped and not self.cut:
            return None
        return (
            f"packing.context_length={self.row_length} is too short for {self.skipped:,} prompts, "
            f"which are skipped with their answers, and for {self.cut:,} answers, which are cut"
        )


def check_pair_packing(config: PackingConfig, place: object) -> None:
    """Raise `ConfigError` if the dataset at `place`, of pairs, cannot be cut as `config` says."""
    if config.mode != "document" or config.remainder != "pad":
        raise ConfigError(
            f"packing.mode: {place} has prompts and answers, which need packing.mode=document and "
            "packing.remainder=pad"
        )
    if config.context_schedule is not None:
        raise ConfigError(
            f"packing.context_schedule: {place} has prompts and answers, which need whole windows"
        )
