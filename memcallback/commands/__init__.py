"""The commands of the command line: what each takes, what it runs, and what it prints.

May import `core`, `isolation`, `devices`, `step`, `prediction`, `batch_size`, `savings` and
`record`. For each command one function adds its arguments and one runs it. The second imports what
it needs, PyTorch too, so `--help` and wrong arguments are answered at once. Start with `step`.
"""
