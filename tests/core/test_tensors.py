"""Walking objects to the tensors in them."""

import functools
import weakref
from collections import ChainMap, UserDict, deque
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memcallback.core.tensors import (
    dense_parts,
    fake_with_values,
    is_on,
    is_wrapper,
    jagged_like,
    known_values,
    lay,
    own_bytes,
    parts_of,
    resized_lengths,
    resized_sparse,
    sparse_tensor,
    storage_bytes,
    tensors_in,
    torch_version,
    walk,
)
from memcallback.core.torch_private import storage_id


class Slotted:
    __slots__ = ("empty", "tensor")


def test_an_object_is_visited_once_and_a_leaf_each_time_it_is_reached():
    inner = [1, 2]
    outer = [inner, inner, 3, 3]
    outer.append(outer)
    visited = list(walk([outer], lambda obj: obj if isinstance(obj, list) else None))
    assert visited == [outer, inner, 1, 2, 3, 3]


def test_an_object_that_was_seen_is_not_walked():
    inner = [1]
    children = {id(inner): inner}
    assert list(walk([[inner, 2]], lambda obj: obj if isinstance(obj, list) else None, children))[
        1:
    ] == [2]


def test_tensors_are_found_in_order_in_attributes_and_slots():
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    slotted = Slotted()
    slotted.tensor = third
    batch = {"a": [first, first], "b": SimpleNamespace(x=second, y=slotted), "c": "text"}
    assert [len(tensor) for tensor in tensors_in(batch)] == [1, 1, 2, 3]


class Opens:
    """Says itself what its attributes are, and notes that it was asked."""

    __slots__ = ("kept", "opened")

    def __init__(self):
        self.opened, self.kept = [], torch.ones(2)

    @property
    def __dict__(self):
        self.opened.append(True)
        return {}


def test_a_class_that_computes_its_attributes_is_not_asked_and_its_slots_are_read():
    value = Opens()
    assert [*tensors_in([value])] == [value.kept]
    assert not value.opened


def test_tensors_are_found_in_every_container_of_python():
    tensor = torch.ones(1)
    weak = weakref.WeakValueDictionary({1: tensor})
    values = {"x": tensor}
    containers = [
        [tensor], (tensor,), {tensor}, frozenset({tensor}), deque([tensor]), values,
        UserDict(values), ChainMap(values), MappingProxyType(values), weak,
    ]  # fmt: skip
    for container in containers:
        assert [id(one) for one in tensors_in(container)] == [id(tensor)], type(container)


class Graph:
    """A batch that can be called, as those of PyTorch Geometric."""

    def __init__(self, nodes):
        self.nodes = nodes

    def __call__(self, *keys):
        return iter(keys)


def test_tensors_of_a_batch_that_can_be_called_are_found_and_those_of_functions_are_not():
    def function():
        """With an attribute, as functions may have."""

    nodes, function.attribute = torch.ones(3), torch.ones(5)
    found = list(tensors_in([Graph(nodes), function, functools.partial(function, torch.ones(7))]))
    assert [len(tensor) for tensor in found] == [3]


INDICES = torch.tensor([[0, 1, 3], [1, 0, 1]])


def test_a_dense_tensor_is_its_own_part_and_a_sparse_one_has_indices_and_values():
    dense = torch.ones(3)
    (part,) = dense_parts(dense)
    assert part is dense
    sparse = torch.sparse_coo_tensor(INDICES, torch.ones(3, 5), (4, 2, 5), check_invariants=True)
    indices, values = dense_parts(sparse)
    assert (indices.shape, values.shape) == ((2, 3), (3, 5))


def test_a_sparse_tensor_without_rows_gets_one_for_each_element_that_it_has():
    empty = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.int64), torch.ones(0), (0, 2), check_invariants=True
    )
    assert resized_sparse(empty, (3, 2))._values().shape == (0,)
    one_row = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 0], [0, 1, 2]]), torch.ones(3), (1, 3), check_invariants=True
    )
    assert resized_sparse(one_row, (3, 3))._values().shape == (9,)


def test_new_ragged_sizes_are_equal_only_to_themselves_and_above_those_of_real_tensors():
    with FakeTensorMode():
        like = torch.zeros(3, dtype=torch.int64)
        first, second = (fake_with_values(like, [0, 2, 7]).nested_int_memo for _ in range(2))
    assert first == first
    assert first != second
    assert str(first).startswith("j")
    assert int(str(first)[1:]) >= 1 << 40


def test_a_nested_tensor_has_values_and_offsets():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged)
    values, offsets = dense_parts(nested)
    assert values.shape == (7, 3)
    assert offsets.tolist() == [0, 2, 7]
    assert is_wrapper(type(nested))


def test_a_tensor_that_handles_operators_itself_is_a_wrapper_and_a_parameter_is_none():
    assert not is_wrapper(torch.Tensor)
    assert not is_wrapper(torch.nn.Parameter)
    assert not is_wrapper(int)

    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    class InParts(torch.Tensor):
        def __tensor_flatten__(self):
            return ["inner", "mesh"], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            return inner["inner"]

    assert is_wrapper(Logged)
    assert is_wrapper(InParts)
    wrapped = torch.ones(2).as_subclass(InParts)
    wrapped.inner, wrapped.mesh = torch.ones(3), "no tensor"
    (part,) = dense_parts(wrapped)
    assert part is wrapped.inner


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x: x.to_sparse_csr(), [(5,), (8,), (8,)]),
        (lambda x: x.to_sparse_csc(), [(3,), (8,), (8,)]),
        (lambda x: x.to_sparse_bsr((2, 2)), [(3,), (2,), (2, 2, 2)]),
        (lambda x: x.to_sparse_bsc((2, 2)), [(2,), (2,), (2, 2, 2)]),
        (lambda x: x.to_sparse(), [(2, 8), (8,)]),
        (lambda x: x, [(4, 2)]),
        (lambda x: torch.nn.UninitializedParameter(), []),
    ],
)
def test_each_layout_has_its_parts(make, shapes):
    assert [tuple(part.shape) for part in parts_of(make(torch.ones(4, 2)))] == shapes


@pytest.mark.parametrize("is_coalesced", [False, True])
def test_a_sparse_tensor_shares_its_parts(is_coalesced):
    values = torch.ones(3, 5)
    made = sparse_tensor(INDICES, values, (4, 2, 5), is_coalesced=is_coalesced)
    assert made.shape == (4, 2, 5)
    assert (made.sparse_dim(), made.dense_dim()) == (2, 1)
    assert made.is_coalesced() is is_coalesced
    assert made._values().data_ptr() == values.data_ptr()
    assert not sparse_tensor(INDICES, values, (4, 2, 5)).is_coalesced()


@pytest.mark.parametrize(("rows", "elements"), [(4, 3), (5, 4), (8, 7), (2, 1), (1, 0), (0, 0)])
def test_further_rows_of_a_sparse_tensor_have_the_mean_number_of_elements(rows, elements):
    sparse = torch.sparse_coo_tensor(INDICES, torch.ones(3), (4, 2), check_invariants=True)
    made = resized_sparse(sparse, (rows, 2))
    assert made.shape == (rows, 2)
    assert made._values().shape == (elements,)
    assert made._indices().shape == (2, elements)


@pytest.mark.parametrize(
    ("number", "lengths"),
    [
        (3, [2, 5, 2]),
        (5, [2, 5, 2, 3, 3]),
        (2, [3, 3]),
        (1, [3]),
    ],
)
def test_more_sequences_have_the_mean_length_and_fewer_share_it(number, lengths):
    assert resized_lengths([2, 5, 2], number) == lengths


def test_fewer_sequences_share_a_rest_and_each_has_at_least_one_element():
    assert resized_lengths([1, 1, 9], 2) == [4, 3]
    assert resized_lengths([0, 0, 1], 2) == [1, 1]
    assert resized_lengths([], 2) == [0, 0]
    assert resized_lengths([5], 3) == [5, 5, 5]


def test_whole_numbers_that_a_fake_was_made_from_are_known():
    with FakeTensorMode() as mode:
        like, unknown = torch.zeros(3, dtype=torch.int64), torch.ones(2)
    made = fake_with_values(like, [0, 2, 7])
    assert known_values(made) == [0, 2, 7]
    assert made.dtype == torch.int64
    assert made.fake_mode is mode
    assert known_values(unknown) is None
    assert known_values(torch.ones(2)) is None


@pytest.mark.parametrize("knows_extremes", [False, True])
def test_a_nested_fake_of_other_lengths_knows_its_longest_and_shortest_if_the_first_did(
    knows_extremes,
):
    options = {"max_seqlen": 5, "min_seqlen": 2} if knows_extremes else {}
    with FakeTensorMode():
        like = torch.zeros(3, dtype=torch.int64)
        first = torch.nested.nested_tensor_from_jagged(
            torch.ones(7, 3), fake_with_values(like, [0, 2, 7]), **options
        )
        made = jagged_like(first, torch.ones(9, 3), fake_with_values(like, [0, 8, 9]))
    assert dense_parts(made)[0].shape == (9, 3)
    known = {name: tensor.shape[0] for name, tensor in made._metadata_cache.items()}
    assert known == ({"max_seqlen": 8, "min_seqlen": 1} if knows_extremes else {})


def test_a_fake_is_laid_in_the_storage_of_another_one():
    mode = FakeTensorMode()
    first, second = (mode.from_tensor(torch.zeros(size)) for size in (4, 2))
    lay(second, first.untyped_storage(), 1, (2,))
    assert storage_id(second.untyped_storage()) == storage_id(first.untyped_storage())
    assert (second.storage_offset(), second.stride(), second.shape) == (1, (2,), (2,))


def test_the_version_of_pytorch_is_two_numbers():
    assert ".".join(map(str, torch_version())) == ".".join(torch.__version__.split(".")[:2])


def test_a_storage_counts_once_and_views_count_what_they_show_of_it():
    whole = torch.ones(100)
    first, second = whole[:10], whole[20:25]
    assert storage_bytes([first, second, first]) == 400
    assert own_bytes([first, second, first]) == 60
    assert own_bytes([whole, first]) == 400
    assert own_bytes([first, torch.ones(3, dtype=torch.float64)]) == 64
    assert own_bytes([]) == storage_bytes([]) == 0


@pytest.mark.parametrize(
    ("device", "wanted", "is_there"),
    [
        ("cuda:1", "cuda", True),
        ("cuda:1", "cuda:1", True),
        ("cuda:1", "cuda:0", False),
        ("cpu", "cuda", False),
        ("cpu", "cpu", True),
    ],
)
def test_a_device_without_an_index_is_any_of_its_type(device, wanted, is_there):
    assert is_on(torch.device(device), torch.device(wanted)) is is_there
