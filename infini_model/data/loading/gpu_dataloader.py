"""The names of the GPU guide, over the one data path.

They run on any device: `cpu` gives the same numbers as `cuda:0`. With a tokenizer that lives on
the device (`load_tokenizer(spec, "cuda")`) text goes there as bytes, and tokens never leave it.
Training itself reads finished shards; see `infini_model.data.loading.loader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infini_model.config import PackingConfig
from infini_model.data.loading.loader import IGNORED, Batch, Loader, open_windows
from infini_model.data.loading.packing import cut_stream
from infini_model.data.tokenizers.gpu.device_tokenizer import (
    DeviceTokenizer,
    Tokens,
    close_documents,
)
from infini_model.data.tokenizers.tokenizer import Texts, Tokenizer


def gpu_clm_process(
    texts: Texts,
    tokenizer: Tokenizer,
    sequence_length: int,
    device: torch.device | str = "cuda",
) -> torch.Tensor:
    """Tokenise documents, close each with the end-of-text token, and cut windows on `device`.

    Returns int64 [windows, sequence_length + 1], with stride `sequence_length`, so that each token
    but the first is predicted once; the partial window at the end is dropped.
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
    """Tokenise documents, close each with the end-of-text token, and cut them on `device`.

    The windows are those of the documents' dataset in any mode, as `Windows.gather` gives them.
    """
    tokens = _closed_stream(texts, tokenizer, device)
    return cut_windows(tokens, tokenizer.eos_token_id, packing, segment_length)


def cut_windows(
    tokens: Tokens, eos_token_id: int, packing: PackingConfig, segment_length: int
) -> Batch:
    """The windows of closed documents in any mode, cut where their ids are."""
    ids = tokens.ids
    offsets = tokens.offsets.cpu().numpy()
    cut = cut_stream(len(ids), lambda: offsets, packing, segment_length)
    length = cut.row_length
    # Where each row begins is arithmetic on few numbers; the tokens stay where they are.
    rows = cut.locate(np.arange(cut.windows))
    behind = int(rows.starts.max(initial=0)) + length + 1 - len(ids)
    if behind > 0:
        ids = torch.cat([ids, ids.new_full((behind,), eos_token_id)])
    starts, valid, first = (torch.from_numpy(part).to(ids.device) for part in rows)
    found = ids.unfold(0, length + 1, 1)[starts]
    input_ids, labels = found[:, :-1].long(), found[:, 1:].long()
    short = torch.nonzero(valid < length).squeeze(1)
    padding = torch.arange(length, device=ids.device) >= valid[short, None]
    input_ids[short] = input_ids[short].masked_fill(padding, eos_token_id)
    labels[short] = labels[short].masked_fill(padding, IGNORED)
    shape = (cut.windows, cut.rows_per_window * length)
    reset = first.reshape(cut.windows, cut.rows_per_window) if packing.mode == "aligned" else None
    return Batch(input_ids.reshape(shape), labels.reshape(shape), reset)


def _closed_stream(texts: Texts, tokenizer: Tokenizer, device: torch.device | str) -> Tokens:
    if isinstance(tokenizer, DeviceTokenizer):
        tokens = tokenizer.encode(texts)
    else:
        ids, offsets = tokenizer.encode_batch(texts)
        tokens = Tokens(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(offsets))
    on_device = Tokens(*(part.to(device) for part in tokens))
    return close_documents(on_device, tokenizer.eos_token_id)


class GPUDataCollatorForCLM:
    """Rows of token ids to `input_ids` and `labels` (the next token) on a device."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """`examples[i]["input_ids"]` holds T + 1 ids, or fewer, whose missing labels are -100.

        Returns `input_ids` and `labels`, each int64 [len(examples), T].
        """
        rows = [torch.as_tensor(np.asarray(row["input_ids"], np.int64)) for row in examples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
        ids = ids.to(self.device)
        return {"input_ids": ids[:, :-1].clamp(min=0), "labels": ids[:, 1:].contiguous()}


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
    """The training batches of a dataset folder, on `device` before they are asked for.

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
