"""The training loop in the order in which it really runs: its passes, updates, manual optimization,
pipelines.

Start with `loop`.
"""
