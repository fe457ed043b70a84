"""Names that other projects and tutorials use for settings, and the keys they correspond to.

A name is matched in any section (`grad_accum_nums`) or at one place (`system.device`). Its value is
a key of the tree or, if no key is equivalent, a clause that says what to use instead.
`infini_model.config.explaining` looks here first.
"""

from __future__ import annotations

import copy
from typing import Any

_COUNTED_IN_WINDOWS = "use evaluation.max_windows instead, which counts windows, not batches"
NAMES: dict[str, str] = {
    # tutorials
    "grad_accum_nums": "training.gradient_accumulation_steps",
    "init_std": "model.initializer_range",
    "use_amp": "use training.precision instead: fp32 for off, bf16 or fp16 for on",
    "fp16": "use training.precision=fp16 instead",
    "no_fp16": "use training.precision=fp32 instead",
    "num_workers": "training needs no loader workers; data.workers sets the tokenising threads",
    "chunk_size": "packing.context_length",
    "save_dir": "run.output_dir",
    "model_name": "the section model sets the shape, data.tokenizer.spec the tokenizer",
    "model_name_or_path": "model.initial_weights",
    "pretrained_model_name_or_path": "model.initial_weights",
    "system.device": "use launch.gpus instead: auto, all, cpu, or numbers such as 0,3",
    "system.device_id": "launch.gpus",
    "device_id": "launch.gpus",
    "gpu_id": "launch.gpus",
    # torchrun
    "nproc_per_node": "launch.processes",
    "nnodes": "launch.num_nodes",
    "master_addr": "use launch.rdzv_endpoint=host:port instead",
    "master_port": "use launch.rdzv_endpoint=host:port instead",
    # transformers
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "num_train_epochs": "training.epochs",
    "bf16": "use training.precision=bf16 instead",
    "lr": "training.learning_rate",
    "clip_grad": "training.max_grad_norm",
    "max_position_embeddings": "packing.context_length",
    "attn_implementation": "launch.attention_backend",
    "torch_dtype": "training.precision",
    "torch_compile": "launch.compile",
    "layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "n_heads": "model.num_attention_heads",
    "max_eval_samples": "evaluation.max_windows",
    "eval_batches": _COUNTED_IN_WINDOWS,
    "max_batches": _COUNTED_IN_WINDOWS,
    # peft
    "lora_r": "training.lora.r",
    "lora_rank": "training.lora.r",
    "lora_dropout": "no layer draws random numbers; training.weight_decay regularises instead",
    # nanotron
    "micro_batch_size": "training.batch_size",
    "batch_accumulation_per_replica": "training.gradient_accumulation_steps",
    "sequence_length": "packing.context_length",
    "train_steps": "training.max_steps",
    "training.steps": "training.max_steps",
    "checkpoint_interval": "checkpoint.save_steps",
    "hf_dataset_or_datasets": "data.source.repository",
    "text_column_name": "data.source.column",
    "tokenizer_name_or_path": "data.tokenizer.spec",
}


def renamed(tree: dict[str, Any]) -> dict[str, Any]:
    """A file's tree, in which the names of the guides' own files stand for the keys here.

    `training.num_workers` has no key: finished shards need no loader workers.
    """
    tree = copy.deepcopy(tree)
    training, system = tree.get("training"), tree.get("system")
    if isinstance(training, dict):
        training.pop("num_workers", None)
        if "grad_accum_nums" in training:
            training["gradient_accumulation_steps"] = training.pop("grad_accum_nums")
    if isinstance(system, dict) and system.keys() <= {"device", "device_id"}:
        del tree["system"]
        device = str(system.get("device", "cuda"))
        gpus = str(system.get("device_id", "auto")) if device == "cuda" else device
        tree["launch"] = {"gpus": gpus} | dict(tree.get("launch") or {})
    return tree
