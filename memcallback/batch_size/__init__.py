"""The largest batch size that fits: estimated from a prediction or a measured step, and verified by
a trace.

May import `core`, `devices`, `step` and `prediction`.
Start with `suggest`.
"""
