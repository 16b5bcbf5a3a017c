"""Runs a training step on fake tensors and records every allocation.

From a `TrainingStep` to a `TracedStep`. May import `core`, `devices`, `step` and `cuda`. Imported
by `prediction` alone. Start with `tracer`; then `loops/` (the training loop), `dispatch/` (each
operator), `patches/` (PyTorch as on CUDA).
"""
