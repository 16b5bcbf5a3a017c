"""Copies of a user's models, batches, functions and optimizers on fake tensors, at any batch size.

Start with `objects`.
"""
