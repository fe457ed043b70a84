"""The memory estimate of a training, compared with what PyTorch's MemTracker counts of a step.

Each case is a small model on the CPU, of which one part of the estimate is large. Its tensors are
fake: they have shapes and no memory. Two steps are taken, and the peak is that of the second. One
micro-batch of one process is counted, with a model that is trained whole. The ratio is
estimate / counted.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.report import publish, spread
from infini_model.config import Config, merge, validate
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.training.memory_estimate import estimate_memory
from infini_model.training.optimizer import make_optimizer

Tree = dict[str, Any]

CPU = torch.device("cpu")
MEBIBYTE = 1 << 20
# The estimate may be wrong by this share.
TOLERANCE = 0.15
SMALL: Tree = {
    "packing": {"context_length": 512},
    "model": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 704,
        "segment_length": 128,
    },
    "training": {"batch_size": 4},
    "launch": {"gpus": "cpu"},
}
RECOMPUTED: Tree = {"launch": {"gradient_checkpointing": True}, "model": {"num_hidden_layers": 8}}
BF16: Tree = {"training": {"precision": "bf16"}}
# Settings laid over `SMALL`.
CASES: dict[str, Tree] = {
    "activations": {},
    "long segments": {"model": {"segment_length": 256}},
    "16 bits": BF16,
    "grouped heads": {"model": {"num_attention_heads": 8, "num_key_value_heads": 2}},
    "long window": {
        "packing": {"context_length": 4096},
        "model": {"segment_length": 512},
        "training": {"batch_size": 1},
    },
    "no memory": {"model": {"memory": "none"}},
    "delta rule": {
        "packing": {"context_length": 2048},
        "training": {"batch_size": 1},
        "model": {"memory": "delta", "segment_length": 64},
    },
    "linear memory": {"model": {"memory": "linear"}},
    "normed queries and keys": {"model": {"qk_norm": "head"}},
    "OLMo 2's norms in 16 bits": merge(
        {"model": {"qk_norm": "projection", "post_norm": True}}, BF16
    ),
    "recomputed": RECOMPUTED,
    "recomputed in 16 bits": merge(RECOMPUTED, BF16),
    "3 of 8 layers recomputed": merge(RECOMPUTED, {"launch": {"gradient_checkpointing": 3}}),
    "weights": {
        "model": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
        "training": {"batch_size": 1},
    },
    "weights in 16 bits, 3 of 6 layers recomputed": {
        "model": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
        "training": {"batch_size": 1, "precision": "bf16"},
        "launch": {"gradient_checkpointing": 3},
    },
    "muon": {
        "model": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6},
        "training": {"batch_size": 1, "optimizer": "muon"},
    },
}


def configured(name: str) -> Config:
    """The configuration of a case."""
    return validate(merge(SMALL, CASES[name]))


def peak_of_step(config: Config) -> int:
    """Bytes of tensors at the peak of the second step of a training; nothing is allocated."""
    objective, precision = make_objective(config), resolve_precision(config.training.precision, CPU)
    rows, length = config.training.batch_size, config.packing.context_length
    with FakeTensorMode():
        model = InfiniLlama(config.model, attention_backend=config.launch.attention_backend)
        layers = config.model.num_hidden_layers
        model.model.recomputed_layers = config.launch.may_recompute(layers)[0]
        module, optimizer = LossModule(model, objective), make_optimizer(model, config.training)
        tokens = torch.randint(config.model.vocab_size or 0, (rows, 1, length + 1))
        batch = Batch(tokens, None, None, torch.arange(rows))
        tracker = MemTracker()
        tracker.track_external(module, optimizer)
        with tracker:
            for step in range(2):
                with precision.autocast(CPU):
                    loss = module(objective.inputs(batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step == 0:  # it makes the moments
                    tracker.reset_mod_stats()
    peak: dict[str, int] = tracker.get_tracker_snapshot("peak")[CPU]
    return peak["Total"]


def main() -> None:
    """Count all cases and print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_estimate", description=__doc__
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
    rows, ratios = [], {}
    for name in parser.parse_args().only:
        config = configured(name)
        peak, estimate = peak_of_step(config), estimate_memory(config, 1, "cpu")
        ratios[name] = spread([estimate.total / peak])
        rows.append(
            {
                "": name,
                "counted MiB": peak // MEBIBYTE,
                "estimate MiB": estimate.total // MEBIBYTE,
                "estimate / counted": estimate.total / peak,
                "parts in GiB": str(estimate).partition(" GiB ")[2].strip("()"),
            }
        )
    publish(
        "memory_estimate",
        "Estimated memory of a training process, and the peak of its second step",
        rows,
        ratios,
        dict.fromkeys(ratios, 1 - TOLERANCE),
        dict.fromkeys(ratios, 1 + TOLERANCE),
    )


if __name__ == "__main__":
    main()
