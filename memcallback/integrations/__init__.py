"""Plugs the package into Lightning, Hugging Face and pytest, and runs trials for `fit_batch_size`.

May import all folders but `cuda`, `trace`, `page` and `commands`. A new library's callback goes
here. Start with `lightning/callback` or `huggingface/callback`.
"""
