"""Composite operators as CUDA decomposes them, where a CPU decomposes them differently.

Start with `registry`.
"""
