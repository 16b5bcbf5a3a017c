"""Records a running loop and monitors its memory.

`recorder` turns the boundaries of a loop into `StepMemory`; `watch` finds these boundaries by
hooks. `monitor` predicts, logs, warns and reports; every callback uses it. `oom_response` acts on
an out-of-memory error, and `rank_exchange` collects the values of all ranks.

May import all folders but `cuda`, `trace`, `integrations` and `commands`.
Start with `recorder`, then `monitor`.
"""
