"""Architectures of the accuracy proof: compact, in plain PyTorch, written for it.

They follow the usual designs where memory is concerned (what is kept for the backward pass, which
operators run, where tensors are copied), not where quality is: there are no special
initialisations.
"""
