"""Lightning: `MemoryCallback`, what it reads of a Trainer (`trainer/`), and `fit_batch_size`
(`fit/`).

Start with `callback`.
"""
