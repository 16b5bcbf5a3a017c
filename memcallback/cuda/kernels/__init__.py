"""Kernel rules: the temporaries of each kernel, and the order in which it allocates its outputs.

Each module has a table `RULES`: operator name -> function of an `OpCall`. Tests compare them with
recordings of PyTorch's CUDA build (tests/recorded/kernels). Start with `norm`.
"""
