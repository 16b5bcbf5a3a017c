"""Replays a trace on a simulated allocator: `predict()` and `Prediction`, at any batch size.

May import `core`, `devices`, `step` and `trace`. Start with `predict`, then `batch_trace`, `replay`
and `prediction`; `textbook/` is the formula for what cannot be traced.
"""
