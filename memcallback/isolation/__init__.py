"""Runs a computation in a child process that can do no harm, and brings its result back.

`run_isolated(work)` is for everything that runs the user's code to predict it. It forks, so that
nothing has to be pickled but the result. Imports `core` alone. Start reading in `isolated`, the
parent's side; `child` is the other one, `harmless` and `syscalls` are what the child gives up.
"""
