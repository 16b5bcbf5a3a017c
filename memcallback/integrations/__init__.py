"""Plugs the recorder into Lightning and Hugging Face, and runs trials for `fit_batch_size`.

May import all folders but `cuda` and `trace`. A new library's callback goes here.
Start with `lightning/callback` or `huggingface`.
"""
