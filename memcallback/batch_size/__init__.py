"""The largest batch size that fits: estimated, then verified by a trace.

The estimate comes from a prediction or a measured step.

May import `core`, `isolation`, `devices`, `step` and `prediction`.
Start with `suggest`.
"""
