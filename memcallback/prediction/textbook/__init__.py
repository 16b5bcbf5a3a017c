"""Memory from a table of layers and a formula, for steps that cannot be traced: an upper and a
lower bound.

Start with `law`, then `shape_pass`.
"""
