"""All patches of PyTorch and other libraries that are in force while a step is traced.

Each module yields patches `(owner, name, replacement)`, and `patching` applies them. Start with
`cuda`.
"""
