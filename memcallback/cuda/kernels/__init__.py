"""Rules for kernels: what each temps from the allocator, gives back and makes, in order.

Each module has a table `RULES`, from the operator's name to a function of a `OpCall`. Start with
`call`.
"""
