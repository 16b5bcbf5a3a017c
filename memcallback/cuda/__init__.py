"""What each CUDA operator allocates, as rules.

To add an operator, see what a trace gets wrong. An operator may need all three:

1. CUDA runs other operators than the CPU: a function in `decompositions/`, named in its table.
2. The result differs in dtype, stride or size from the fake kernel's: `outputs.CORRECTIONS`; the
   fake kernel fails: `outputs.REPLACEMENTS`.
3. The kernel takes scratch memory, or allocates its outputs in another order: the table `RULES` of
   a module in `kernels/`.

A trace asks them in this order, each by the operator's name and with one `OpCall`:
`decompositions.registry.decomposition_of`, `rules.corrected_result`, `rules.kernel_rule`.

May import `core` and `devices`. Imported by `trace` alone. Start with `op_call`, then `rules`.
"""
