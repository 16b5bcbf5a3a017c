"""Copies of a user's objects on fake tensors: models, batches, hooks, optimizers; and batches of
other sizes.

Start with `fakes`.
"""
