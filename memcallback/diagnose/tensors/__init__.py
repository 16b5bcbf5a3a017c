"""Finds live tensors and their owners, and compares them between points of a program.

Start with `diff`.
"""
