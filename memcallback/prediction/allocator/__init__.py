"""Simulations of PyTorch's caching allocator and of CPU memory. They work without torch.

May import `core`. Start with `caching`; `settings` reads PYTORCH_CUDA_ALLOC_CONF.
"""
