"""The HTML page of a step: its charts, and how they look. A page fetches nothing from elsewhere.

May import `core`. Start with `page`, then `timeline`.
"""
