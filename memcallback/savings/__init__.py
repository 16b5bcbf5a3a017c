"""Savings of memory: applied (`checkpoint`, `amp`, `accumulate`) and compared (`what_if`).

May import `core`, `isolation`, `devices`, `step`, `page`, `prediction` and `batch_size`. A new
saving is applied in a module of its own and compared as a candidate in `candidates`. Start with
`what_if`.
"""
