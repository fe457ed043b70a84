"""Token ids of documents on a device, and what begins and ends a document."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from infini_model.data.tokenizers.gpu.ragged import ranges
from infini_model.data.tokenizers.tokenizer import Texts


class Tokens(NamedTuple):
    """`Ragged` on a device: `ids` int32 [N], `offsets` int64 [documents + 1]."""

    ids: torch.Tensor
    offsets: torch.Tensor


@runtime_checkable
class EncodesOnDevice(Protocol):
    """A tokenizer whose ids can stay on its device."""

    def encode(self, texts: Texts) -> Tokens:
        """The ids of each document, left on the device."""


def close_documents(tokens: Tokens, eos_token_id: int, bos_token_id: int | None = None) -> Tokens:
    """The same documents with the end-of-text token after each.

    The beginning-of-text token, if there is one, is before each.
    """
    ids, offsets = tokens
    before = 0 if bos_token_id is None else 1
    closed = offsets + (before + 1) * torch.arange(len(offsets), device=offsets.device)
    values = ids.new_full((len(ids) + (before + 1) * (len(offsets) - 1),), eos_token_id)
    if bos_token_id is not None:
        values[closed[:-1]] = bos_token_id
    values[ranges(closed[:-1] + before, offsets.diff())] = ids
    return Tokens(values, closed)
