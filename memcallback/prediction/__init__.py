"""Replays a trace on a simulated allocator: `predict()` and `Prediction`, at any batch size.

May import `core`, `isolation`, `devices`, `step`, `trace` and `page`. Start with `predict`, then
`batch_trace`, `replay` and `prediction`; `textbook/` is the formula for what cannot be traced.
"""
