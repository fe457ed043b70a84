"""Read and write folders of Llama and its kind: config.json and safetensors, whole or sharded.

The settings of Infini-attention are stored in config.json under one key, `infini_attention`, which
`transformers` preserves and ignores, and its parameters as tensors such as `…self_attn.gate`, named
as in the model. Without a past a model is stored as the Llama, Qwen2, … or LLaDA that computes the
same, if there is one.
"""
