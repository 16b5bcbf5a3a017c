"""Walking objects to the tensors in them."""

import functools
from types import SimpleNamespace

import torch

from memcallback.core.tensors import tensors_in, walk


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
