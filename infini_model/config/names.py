"""Names of settings as other projects and the guides write them, and what they are here.

A name stands for itself (`grad_accum_nums`) wherever a user writes it, or for one place
(`system.device`). What it leads to is a key of the tree, or, where no key means the same, a clause
that says what takes its place. `infini_model.config.explaining` looks here first.
"""

from __future__ import annotations

from infini_model.config.moved import MOVED, REMOVED

NAMES: dict[str, str] = {
    # the guides
    "grad_accum_nums": "training.gradient_accumulation_steps",
    "init_std": "model.initializer_range",
    "use_amp": "training.precision takes its place: fp32 is off, bf16 and fp16 are on",
    "fp16": "training.precision=fp16 takes its place",
    "no_fp16": "training.precision=fp32 takes its place",
    "num_workers": "training needs no loader workers; data.workers sets the threads that tokenise",
    "chunk_size": "packing.context_length",
    "save_dir": "run.output_dir",
    "model_name": "the section model sets the shape, data.tokenizer.spec names the tokenizer",
    "system.device": "launch.gpus takes its place: auto, all, cpu, or numbers such as 0,3",
    "system.device_id": "launch.gpus",
    "device_id": "launch.gpus",
    "gpu_id": "launch.gpus",
    # torchrun
    "nproc_per_node": "launch.processes",
    "nnodes": "launch.num_nodes",
    "master_addr": "launch.rdzv_endpoint=host:port takes the place of both address and port",
    "master_port": "launch.rdzv_endpoint=host:port takes the place of both address and port",
    # transformers
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "evaluation.batch_size",
    "num_train_epochs": "training.epochs",
    "bf16": "training.precision=bf16 takes its place",
    "lr": "training.learning_rate",
    "clip_grad": "training.max_grad_norm",
    "max_position_embeddings": "packing.context_length",
    "attn_implementation": "launch.attention_backend",
    "torch_dtype": "training.precision",
    "layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "n_heads": "model.num_attention_heads",
    "max_eval_samples": "evaluation.max_windows",
    "eval_batches": REMOVED["logging.eval_batches"],
    "max_batches": REMOVED["evaluation.max_batches"],
    # nanotron
    "micro_batch_size": "training.batch_size",
    "batch_accumulation_per_replica": "training.gradient_accumulation_steps",
    "sequence_length": "packing.context_length",
    "train_steps": "training.max_steps",
    "checkpoint_interval": "checkpoint.save_steps",
    "hf_dataset_or_datasets": "data.source.repository",
    "text_column_name": "data.source.column",
    "tokenizer_name_or_path": "data.tokenizer.spec",
    # former versions
    **MOVED,
    **REMOVED,
}
