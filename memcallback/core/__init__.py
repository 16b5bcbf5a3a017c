"""The words that every other folder speaks, as data: what a phase and a category are, the trace of a step,
the memory of a step, a table of modules. And small tools: sizes as text, argument checks, warnings, tables.

Imports nothing of the package. Works without torch, but for `tensors`.
Start with `types`, `allocation_trace` and `step_memory`.
"""
