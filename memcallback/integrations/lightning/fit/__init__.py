"""`fit_batch_size`: runs trials of the Trainer's own loop, and restores everything after each.

Start with `fit_batch_size`, then `search`.
"""
