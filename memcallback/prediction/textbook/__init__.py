"""The fallback for steps that cannot be traced: upper and lower bounds from a table of layers.

May import `core`, `devices`, `step` and the rest of `prediction`. Start with `law`, then `predict`,
then `shape_pass`, which is also the public `layers()`.
"""
