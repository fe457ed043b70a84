"""Read and write folders of Llama and LLaDA: config.json and safetensors, whole or sharded.

The settings of Infini-attention are stored in config.json under one key, `infini_attention`, which
`transformers` preserves and ignores, and its parameters as tensors such as `…self_attn.gate`, named
as in the model. Without a memory a model is stored as a Llama or, if it is bidirectional, a LLaDA.
"""
