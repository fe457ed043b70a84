"""The peer of `benchmarks.train_step`: the same model and optimizer in a plain PyTorch loop.

It trains on one batch repeatedly, without data loading, schedule, metrics or checkpoints, and
prints one line of JSON: the seconds of the steps after the warm-up.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from infini_model.config import load_config
from infini_model.model.llama import InfiniLlama
from infini_model.training.optimizer import make_optimizer

# Steps that exclude one-time compilation, autotuning and allocation.
WARM_UP = 3


def main(config_file: str, steps: str) -> None:
    """Time `steps` steps of the configuration in `config_file`."""
    config = load_config(file=Path(config_file))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.run.seed)
    model = InfiniLlama(config.model).to(device)
    optimizer = make_optimizer(model, config.training)
    shape = (config.training.batch_size, config.packing.context_length + 1)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, device=device)
    for step in range(WARM_UP + int(steps)):
        if step == WARM_UP:
            began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), config.training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Reading the loss synchronizes with the device at every step, as logging it would.
        loss.item()
    print(json.dumps({"seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main(*sys.argv[1:])
