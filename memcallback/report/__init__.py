"""What people see: the report, plots, TensorBoard, loggers.

May import `core`, `page`, `prediction`, `batch_size` and `savings`. Below this folder nothing
imports TensorBoard or Lightning. Start with `report`.
"""
