"""Which tensors are alive on a device, who owns them, and which came and went between two points.

Start with `diff`.
"""
