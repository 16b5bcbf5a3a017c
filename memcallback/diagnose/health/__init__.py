"""Problems of a running training: retries, fragmentation, leaks, other processes.

Start with `monitor`.
"""
