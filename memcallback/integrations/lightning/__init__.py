"""Lightning: `MemoryCallback`, its view of a Trainer (`trainer/`), `fit_batch_size` (`fit/`).

Start with `callback`.
"""
