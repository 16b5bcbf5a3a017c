"""`fit_batch_size`: trials of the Trainer's own loop, after each of which everything is put back.

Start with `fit_batch_size`, then `search`.
"""
