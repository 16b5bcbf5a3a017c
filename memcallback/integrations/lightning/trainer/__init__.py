"""Reads a Lightning Trainer: its progress, its step as a `TrainingStep`, its strategy's ranks.

Start with `step`.
"""
