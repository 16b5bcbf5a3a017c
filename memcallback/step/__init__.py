"""One training step: model, batch, loss, optimizers, precision and ranks.

Also the tensors that it holds, copies of it on fake tensors, and hooks that follow its modules.

May import `core` and `isolation`. A new kind of loop or distributed job starts here.
Start with `training_step`.
"""
