"""Attention across ranks by the kernels of TPUs and GPUs."""
