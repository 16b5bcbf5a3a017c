"""What went wrong: out of memory, leaks, unhealthy allocators, tensors that came and went.

May import `core`, `devices`, `step`, `prediction` and `savings`.
Start with `out_of_memory/explain`, `health/watch` or `tensors/diff`.
"""
