"""The Triton kernels of the GPU tokenizer; importing them needs Triton."""
