"""Pictures for loggers: the step, its peak, the batch size, savings, modules.

All are 640 x 400 with letters of 14 points, so that they can be read as TensorBoard first shows
them. Start with `canvas`.
"""
