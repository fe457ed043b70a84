"""The peer of `train_step`: the same model and optimizer in a plain PyTorch loop, nothing else.

One batch, over and over; no data, no schedule, no metrics, no checkpoints. It prints one line of
JSON: the seconds from the end of step `skip` to the end of the last.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from infini_model.config import load_config
from infini_model.llama import InfiniLlama
from infini_model.training.optimizer import make_optimizer


def main(config_file: str, skip: str) -> None:
    """Take `training.max_steps` steps of the configuration in `config_file`."""
    config = load_config(file=Path(config_file))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.run.seed)
    model = InfiniLlama(config.model).to(device)
    optimizer = make_optimizer(model, config.training)
    shape = (config.training.batch_size, config.packing.context_length + 1)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, device=device)
    began = 0.0
    for step in range(1, config.training.max_steps + 1):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step in (int(skip), config.training.max_steps):
            # Waits for the device, like a clock would have to.
            loss.item()
            began, ended = (time.perf_counter(), 0.0) if not began else (began, time.perf_counter())
    print(json.dumps({"seconds": ended - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
