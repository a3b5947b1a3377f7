"""Triton kernels of the CUDA path; `reference` beside them, and `kernels.reference` for attention, define them."""
