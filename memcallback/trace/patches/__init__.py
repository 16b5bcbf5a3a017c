"""Every patch of PyTorch and of libraries that is in force while a step is traced, for the tracing
thread alone.

Start with `cuda`.
"""
