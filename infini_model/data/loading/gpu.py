"""Text to windows on a device, under the names of the former GPU data loader.

The functions run on any device: `cpu` gives the same numbers as `cuda:0`. With a device tokenizer
(`load_tokenizer(spec, "cuda")`) text is copied to the device as bytes and tokens never leave it.
Training reads finished shards instead; see `infini_model.data.loading.loader`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.data.tokenizers.gpu import EncodesOnDevice
from infini_model.data.tokenizers.tokenizer import Texts, Tokenizer


def gpu_clm_process(
    texts: Texts,
    tokenizer: Tokenizer,
    sequence_length: int,
    device: torch.device | str = "cuda",
) -> torch.Tensor:
    """Tokenise documents as a dataset has them, and pack windows on `device`.

    Each begins with the beginning-of-text token, if there is one, and ends with end-of-text.
    Returns int64 [windows, sequence_length + 1] with stride `sequence_length`, so each token but
    the first is predicted once; a partial window at the end is dropped.
    """
    stream = _closed_stream(texts, tokenizer, device)
    if len(stream) <= sequence_length:
        return stream.new_empty((0, sequence_length + 1))
    return stream.unfold(0, sequence_length + 1, sequence_length)


def _closed_stream(texts: Texts, tokenizer: Tokenizer, device: torch.device | str) -> torch.Tensor:
    """The ids of all documents, each with what begins and ends it: int64 [N]."""
    if isinstance(tokenizer, EncodesOnDevice):
        ids, offsets = tokenizer.encode(texts)
    else:
        ids, offsets = map(torch.from_numpy, tokenizer.encode_batch(texts))
    ids, offsets = ids.to(device).long(), offsets.to(device)
    bos = tokenizer.bos_token_id
    before = 0 if bos is None else 1
    document = torch.arange(len(offsets) - 1, device=ids.device)
    stream = ids.new_full((len(ids) + (before + 1) * len(document),), tokenizer.eos_token_id)
    if bos is not None:
        stream[offsets[:-1] + 2 * document] = bos
    shift = before + (before + 1) * document.repeat_interleave(offsets.diff())
    stream[torch.arange(len(ids), device=ids.device) + shift] = ids
    return stream


def get_gpu_train_dataloader(
    dataset_dir: Path,
    packing: PackingConfig,
    segment_length: int,
    *,
    batch_size: int,
    device: torch.device | str = "cuda",
    **options: Any,
) -> Loader:
    """The training batches of a dataset folder, prefetched to `device`.

    `options` are others of `Loader`, such as `rank`, `world_size` and `seed`.
    Raises `DataError` as `open_windows` and `Loader` do.
    """
    windows = open_windows(dataset_dir, "train", packing, segment_length)
    return Loader(windows, batch_size=batch_size, device=device, **options)
