"""From an out-of-memory error to a report: what was in the memory, and what would help.

Start with `explain`.
"""
