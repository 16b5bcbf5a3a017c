"""Turns an out-of-memory error into a report: what was live, and what would help.

Start with `explain`.
"""
