"""Byte-level BPE on a GPU, in Triton kernels."""
