"""Composite operators as CUDA decomposes them, where that differs from what fake tensors on a CPU
do.

Start with `registry`.
"""
