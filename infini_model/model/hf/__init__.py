"""Read and write folders of Llama and its kind: config.json and safetensors, whole or sharded.

The settings of Infini-attention are stored in config.json under one key, `infini_attention`, which
`transformers` preserves and ignores, and its parameters as tensors such as `…self_attn.gate`, named
as in the model. Without a past a model is stored as the Llama, Qwen2, … that computes the same or,
if it is bidirectional, the LLaDA.
"""
