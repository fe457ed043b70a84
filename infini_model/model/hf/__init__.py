"""Read and write folders of Llama and LLaDA: config.json and safetensors, whole or sharded.

The settings of Infini-attention are stored in config.json under one key, `infini_attention`, which
`transformers` preserves and ignores, and its parameters as tensors such as `…self_attn.gate`, named
as in the model. A bidirectional model, with a memory or without, is stored as a LLaDA.
"""

from infini_model.model.hf.adapter import (
    Adapter,
    is_adapter_folder,
    read_adapter,
    read_adapter_tensors,
    write_adapter,
)
from infini_model.model.hf.config import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION,
    INDEX,
    NO_TOKENS,
    TokenIds,
    read_config,
)
from infini_model.model.hf.weights import (
    check_tensors,
    describe_tokens,
    read_tensors,
    refuse_other_files,
    save_tensors,
    weight_files,
    write_checkpoint,
    write_files,
)

__all__ = [
    "ADAPTER_CONFIG",
    "CONFIG",
    "GENERATION",
    "INDEX",
    "NO_TOKENS",
    "Adapter",
    "TokenIds",
    "check_tensors",
    "describe_tokens",
    "is_adapter_folder",
    "read_adapter",
    "read_adapter_tensors",
    "read_config",
    "read_tensors",
    "refuse_other_files",
    "save_tensors",
    "weight_files",
    "write_adapter",
    "write_checkpoint",
    "write_files",
]
