"""Records a running loop: boundaries in, `StepMemory` out; and the monitor behind all callbacks.

May import all folders before it but `cuda` and `trace`.
Start with `recorder`, then `monitor`.
"""
