"""Convolutions: the backend that CUDA chooses, its copies and columns, and cuDNN's workspace.

Start with `rule`; `call` has the geometry, `workspace` asks cuDNN. For what cuDNN cannot know
without a device there are rules: `needs_device` for plans that it leaves out, `stream_k` for what
some plans take on Hopper.
"""
