"""PyTorch's caching allocator, simulated, and a CPU's memory. Works without torch.

Start with `caching`.
"""
