"""What a convolution takes from the allocator: its backend, the workspace that cuDNN asks for, its
steps.

Start with `rule`.
"""
