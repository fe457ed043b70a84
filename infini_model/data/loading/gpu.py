"""Text to windows on a device, under the names of the former GPU data loader.

The functions run on any device: `cpu` gives the same numbers as `cuda:0`. With a device tokenizer
(`load_tokenizer(spec, "cuda")`) text is copied to the device as bytes and tokens never leave it.
Training reads finished shards instead; see `infini_model.data.loading.loader`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.data.tokenizers.gpu.tokens import EncodesOnDevice, Tokens, close_documents
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
    stream = _closed_stream(texts, tokenizer, device).ids.long()
    if len(stream) <= sequence_length:
        return stream.new_empty((0, sequence_length + 1))
    return stream.unfold(0, sequence_length + 1, sequence_length)


def _closed_stream(texts: Texts, tokenizer: Tokenizer, device: torch.device | str) -> Tokens:
    if isinstance(tokenizer, EncodesOnDevice):
        tokens = tokenizer.encode(texts)
    else:
        ids, offsets = tokenizer.encode_batch(texts)
        tokens = Tokens(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(offsets))
    on_device = Tokens(*(part.to(device) for part in tokens))
    return close_documents(on_device, tokenizer.eos_token_id, tokenizer.bos_token_id)


def get_gpu_train_dataloader(
    dataset_dir: Path,
    packing: PackingConfig,
    segment_length: int,
    *,
    batch_size: int,
    gradient_accumulation_steps: int = 1,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    consumed: int = 0,
    device: torch.device | str = "cuda",
) -> Loader:
    """The training batches of a dataset folder, prefetched to `device`.

    Raises `DataError` as `open_windows` and `Loader` do.
    """
    return Loader(
        open_windows(dataset_dir, "train", packing, segment_length),
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        rank=rank,
        world_size=world_size,
        seed=seed,
        consumed=consumed,
        device=device,
    )
