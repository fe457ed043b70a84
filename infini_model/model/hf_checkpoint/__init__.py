"""Read and write Hugging Face Llama folders: config.json and safetensors, whole or sharded.

The settings of Infini-attention are stored in config.json under one key, `infini_attention`, which
`transformers` preserves and ignores, and its parameters as the tensors `…self_attn.gate` and
`…self_attn.memory_key_shift`. Nothing is unpickled.
"""

from infini_model.model.hf_checkpoint.config import CONFIG, INDEX, read_config
from infini_model.model.hf_checkpoint.reading import read_tensors
from infini_model.model.hf_checkpoint.writing import save_tensors, write_checkpoint, write_files

__all__ = [
    "CONFIG",
    "INDEX",
    "read_config",
    "read_tensors",
    "save_tensors",
    "write_checkpoint",
    "write_files",
]
