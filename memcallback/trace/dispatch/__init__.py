"""What happens at each operator while a step is traced: its fake outputs, and its allocations in
the ledger.

Start with `mode`, then `ledger`.
"""
