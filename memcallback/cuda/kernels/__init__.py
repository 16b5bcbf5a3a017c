"""Rules for kernels: what each takes from the allocator, gives back and makes, in order.

Each module has a table `RULES`, from the operator's name to a function of a `Call`. Start with
`call`.
"""
