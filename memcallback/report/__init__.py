"""What people see: the report, plots, TensorBoard, loggers.

May import `core`, `prediction`, `batch_size` and `savings`. Below this folder nothing knows
TensorBoard or Lightning. Start with `report`.
"""
