"""Convolutions: the backend that CUDA chooses, its copies and columns, and cuDNN's workspace.

Start with `rule`; `call` has the geometry, `workspace` asks cuDNN.
"""
