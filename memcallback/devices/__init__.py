"""What a device is, and what is on it now: the catalogue of cards, this machine's GPU, meters of
its memory, NVML.

May import `core`. A new card goes into `catalogue`; a new kind of device needs a meter in `meters`.
Start with `catalogue`, then `meters`.
"""
