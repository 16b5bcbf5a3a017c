"""The training loop in the order in which it really runs.

Start with `loop`; the passes are in `passes`.
"""
