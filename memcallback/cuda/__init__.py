"""What each CUDA operator allocates, as rules.

Where to add an operator depends on what a trace gets wrong. The three are asked in this order, and
an operator may need several:

1. `decompositions/`: CUDA runs it as other operators than the CPU does.
2. `outputs`: its outputs on CUDA have another dtype, stride or size than those of the fake kernel.
3. `kernels/` and `convolution/`: its kernel takes scratch memory, or makes its outputs in another
   order.

May import `core` and `devices`. Imported by `trace` alone. Start with `rules`.
"""
