"""Signs of trouble in a running training: retries, fragmentation, memory that keeps growing, other
processes.

Start with `watch`.
"""
