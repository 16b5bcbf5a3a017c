"""One training step: model, batch, loss, optimizer, precision and ranks.

Also the tensors that it holds, copies of it on fake tensors, hooks that follow its modules.

May import `core`. A new kind of loop or job starts here.
Start with `training_step`.
"""
