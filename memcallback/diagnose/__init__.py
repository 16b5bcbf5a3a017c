"""Explains memory problems: out of memory, leaks, unhealthy allocators, tensors over time.

May import `core`, `devices`, `step`, `page`, `prediction` and `savings`.
Start with `out_of_memory/explain`, `health/monitor` or `tensors/diff`.
"""
