"""What happens at each operator of a traced step: its fake result, and its allocations.

Start with `mode`, then `ledger` and `kernel_writer`.
"""
