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
from infini_model.data.loading.packing import OffsetsInMemory, pack
from infini_model.data.loading.windows import Batch, open_windows
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


def gpu_clm_windows(
    texts: Texts,
    tokenizer: Tokenizer,
    packing: PackingConfig,
    segment_length: int,
    device: torch.device | str = "cuda",
) -> Batch:
    """Tokenise documents as a dataset has them, and pack them on `device`.

    The windows equal those of a dataset of the documents in any mode, as `Windows.gather` returns
    them.
    """
    tokens = _closed_stream(texts, tokenizer, device)
    return pack_tokens(tokens, tokenizer.eos_token_id, packing, segment_length)


def pack_tokens(
    tokens: Tokens, eos_token_id: int, config: PackingConfig, segment_length: int
) -> Batch:
    """Pack documents that end with end-of-text into windows, on the device of their ids."""
    ids = tokens.ids
    documents = OffsetsInMemory(tokens.offsets.cpu().numpy())
    packing = pack(documents, config, segment_length)
    length = packing.row_length
    # Row starts are computed on the CPU from the offsets; the tokens stay on the device.
    numbers = np.arange(packing.windows)
    rows = packing.locate(numbers)
    missing = int(rows.starts.max(initial=0)) + length + 1 - len(ids)
    if missing > 0:
        ids = torch.cat([ids, ids.new_full((missing,), eos_token_id)])
    starts, valid, first = (torch.from_numpy(part).to(ids.device) for part in rows)
    found = ids.unfold(0, length + 1, 1)[starts].long()
    short = torch.nonzero(valid < length).squeeze(1)
    beyond = torch.arange(length + 1, device=ids.device) > valid[short, None]
    found[short] = found[short].masked_fill(beyond, eos_token_id)
    shape = (packing.windows, packing.rows_per_window)
    return Batch(
        found.reshape(*shape, length + 1),
        valid.reshape(shape) if len(short) else None,
        first.reshape(shape) if config.mode == "aligned" else None,
        torch.from_numpy(numbers).to(ids.device),
    )


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
