"""Operators on sparse and nested tensors, on a CUDA device or on fakes that stand for it, and what
they ask of the allocator.

python tests/sparse_cases.py        records it, on a machine with a CUDA device
"""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

RECORDED = Path(__file__).parent / "recorded" / "sparse.json"


def rows(count=80, shape=(200, 10), *, is_coalesced=False):
    """A sparse tensor of rows."""
    indices = torch.zeros(1, count, dtype=torch.int64, device="cuda")
    made = torch.sparse_coo_tensor(
        indices, torch.zeros(count, *shape[1:], device="cuda"), shape, check_invariants=False
    )
    return made._coalesced_(True) if is_coalesced else made


def matrix(count=30, shape=(16, 16), *, is_coalesced=True):
    """A sparse matrix of numbers."""
    indices = torch.zeros(2, count, dtype=torch.int64, device="cuda")
    made = torch.sparse_coo_tensor(
        indices, torch.zeros(count, device="cuda"), shape, check_invariants=False
    )
    return made._coalesced_(True) if is_coalesced else made


def dense(*shape):
    return torch.zeros(shape, device="cuda")


def written(make, function):
    """A function that writes over a sparse tensor, which is made anew for each call."""

    def call():
        made = make()
        function(made)
        return made

    return call


def bag(mode):
    weight = dense(200, 10).requires_grad_()
    indices = torch.zeros(16, 5, dtype=torch.int64, device="cuda")

    def call():
        weight.grad = None
        F.embedding_bag(indices, weight, mode=mode, sparse=True).sum().backward()
        return weight.grad

    return call


def unary(function, **options):
    sparse = rows(**options)
    return lambda: function(sparse)


def with_dense(function, make=rows, shape=(200, 10), **options):
    sparse, other = make(**options), dense(*shape)
    return lambda: function(other, sparse)


def product(function, shape=(16, 32)):
    sparse, other = matrix(), dense(*shape)
    return lambda: function(sparse, other)


def matrix_gradient():
    sparse = matrix()

    def call():
        weight = dense(16, 32).requires_grad_()
        torch.sparse.mm(sparse, weight).sum()
        return weight

    return call


def masked(function):
    ones, other = rows(is_coalesced=True), dense(200, 10)
    return lambda: function(other, ones)


def masked_matrix(count, num_searched, **options):
    one, mask = matrix(count, **options), matrix(num_searched)
    return lambda: one.sparse_mask(mask)


def attention(name, dtype, heads=4, size=64, dropout=0.0):
    """Attention over 16 sequences, one after the other, of at most 100 steps."""
    tensor = torch.zeros(1000, heads, size, dtype=dtype, device="cuda")
    tensor = tensor if name == "flash" else tensor[None]
    starts = torch.zeros(17, dtype=torch.int32, device="cuda")

    def flash():
        out, sums, *state, _ = torch.ops.aten._flash_attention_forward(
            tensor, tensor, tensor, starts, starts, 100, 100, dropout, False, False, scale=1.0
        )
        backward = torch.ops.aten._flash_attention_backward
        return backward(
            tensor,
            tensor,
            tensor,
            tensor,
            out,
            sums,
            starts,
            starts,
            100,
            100,
            dropout,
            False,
            *state,
            scale=1.0,
        )

    def efficient():
        numbers = (starts, starts, 100, 100, dropout, 0, True)
        out, sums, *state, _, _ = torch.ops.aten._efficient_attention_forward(
            tensor, tensor, tensor, None, *numbers
        )
        backward = torch.ops.aten._efficient_attention_backward
        return backward(
            tensor,
            tensor,
            tensor,
            tensor,
            None,
            out,
            starts,
            starts,
            100,
            100,
            sums,
            dropout,
            *state,
            0,
            False,
        )

    return flash if name == "flash" else efficient


#: With no rows at all: a virtual device finds none of the indices to be different from the others.
COALESCED = {
    f"coalesce {count} of {kind.__name__}": lambda kind=kind, count=count, shape=shape: (
        lambda sparse: lambda: sparse.coalesce()
    )(kind(count, shape, is_coalesced=False))
    for count in (2, 80, 1000, 20000, 300000)
    for kind, shape in ((rows, (0, 10)), (matrix, (0, 16)))
}
CASES = {
    **COALESCED,
    "clone": lambda: unary(torch.clone),
    "a half": lambda: unary(torch.Tensor.half),
    "sparse + sparse": lambda: unary(lambda one: one + one),
    "sparse - sparse": lambda: unary(lambda one: one - one),
    "sparse * 2": lambda: unary(lambda one: one * 2),
    "sparse / 2": lambda: unary(lambda one: one / 2),
    "- sparse": lambda: unary(torch.neg),
    "sparse.sum()": lambda: unary(torch.sum),
    "sparse.to_dense()": lambda: unary(torch.Tensor.to_dense),
    "zeros like sparse": lambda: unary(torch.zeros_like),
    "coalesced ** 2": lambda: unary(lambda one: one**2, is_coalesced=True),
    "coalesced sqrt": lambda: unary(torch.sqrt, is_coalesced=True),
    "coalesced norm": lambda: unary(torch.norm, is_coalesced=True),
    "coalesced.to_dense()": lambda: unary(torch.Tensor.to_dense, is_coalesced=True),
    "dense += sparse": lambda: with_dense(lambda other, sparse: other.add_(sparse, alpha=-0.1)),
    "dense += coalesced": lambda: with_dense(
        lambda other, sparse: other.add_(sparse), is_coalesced=True
    ),
    "dense += matrix": lambda: with_dense(
        lambda other, sparse: other.add_(sparse), matrix, (16, 16), is_coalesced=False
    ),
    "dense += half": lambda: with_dense(lambda other, sparse: other.add_(sparse.half())),
    "dense -= sparse": lambda: with_dense(lambda other, sparse: other.sub_(sparse)),
    "dense + sparse": lambda: with_dense(lambda other, sparse: other + sparse),
    "dense - sparse": lambda: with_dense(lambda other, sparse: other - sparse),
    "sparse * dense": lambda: with_dense(lambda other, sparse: sparse * other),
    "sparse mask": lambda: masked(torch.Tensor.sparse_mask),
    "mask of coalesced": lambda: masked_matrix(30, 50, is_coalesced=True),
    "mask of few": lambda: masked_matrix(50, 30, is_coalesced=True),
    "mask of sparse": lambda: masked_matrix(30, 30, is_coalesced=False),
    "sparse += sparse": lambda: written(rows, lambda one: one.add_(one.clone(), alpha=0.5)),
    "sparse *= 2": lambda: written(rows, lambda one: one.mul_(2)),
    "sparse /= 2": lambda: written(rows, lambda one: one.div_(2)),
    "coalesced sqrt_": lambda: written(lambda: rows(is_coalesced=True), torch.sqrt_),
    "sparse.zero_()": lambda: written(rows, torch.Tensor.zero_),
    "sparse.copy_()": lambda: written(rows, lambda one: one.copy_(one.clone())),
    "sparse @ dense": lambda: product(torch.matmul),
    "sparse.mm": lambda: product(torch.sparse.mm),
    "sparse.mm of a transposed": lambda: product(
        lambda sparse, other: torch.sparse.mm(sparse, other.t()), (32, 16)
    ),
    "sparse.mm of expanded": lambda: product(
        lambda sparse, other: torch.sparse.mm(sparse, other.expand(16, 32)), ()
    ),
    "sparse @ vector": lambda: product(torch.mv, (16,)),
    "addmm": lambda: product(lambda sparse, other: torch.addmm(other, sparse, other)),
    "sparse.addmm": lambda: product(lambda sparse, other: torch.sparse.addmm(other, sparse, other)),
    "sparse.t()": lambda: product(lambda sparse, other: sparse.t()),
    "sparse.mm and its sum": matrix_gradient,
    **{
        f"{name} attention {dtype} {size} {dropout}": (
            lambda arguments=(name, dtype, 4, size, dropout): attention(*arguments)
        )
        for name, dtype in (
            ("flash", torch.float16),
            ("flash", torch.bfloat16),
            ("efficient", torch.float32),
            ("efficient", torch.float16),
        )
        for size in (8, 64, 128)
        for dropout in (0.0, 0.1)
    },
    "bag of the mean": lambda: bag("mean"),
    "bag of the sum": lambda: bag("sum"),
}


def text(events):
    """Allocations and frees in order: `+640` asks for 640 bytes, `-0` frees the first. What is
    freed in one go is in order.
    """
    lines, freed = [], []
    for event in (*events, None):
        if isinstance(event, int):
            freed.append(event)
            continue
        lines += [f"-{number}" for number in sorted(freed)]
        freed = []
        if event is not None:
            lines.append(event)
    return " ".join(lines)


def history(call):
    """What a call asks of a CUDA device's allocator."""
    kept = call()
    torch.cuda.memory._record_memory_history(max_entries=100000, context=None)
    kept = call()  # noqa: F841 - it stands until all is read
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    events, alive, count = [], {}, 0
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = count
            events.append(f"+{entry['size']}")
            count += 1
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            events.append(alive.pop(entry["addr"]))
    return text(events)


def main():
    asked = {name: history(make()) for name, make in CASES.items()}
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    RECORDED.write_text(json.dumps({**about, "cases": asked}, indent=0) + "\n")


if __name__ == "__main__":
    main()
