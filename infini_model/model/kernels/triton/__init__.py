"""Triton kernels of the memory operators; `launch` starts them, the others define them."""
