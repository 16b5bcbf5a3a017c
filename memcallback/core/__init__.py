"""The words that every other folder uses, as data, and small tools.

Phase and category, the trace of a step, the memory of a step, a table of modules; sizes as text,
argument checks, warnings, documents.

Imports nothing of the package. Works without torch, except `tensors` and `torch_private`.
Start with `types`, `allocation_trace` and `step_memory`.
"""
