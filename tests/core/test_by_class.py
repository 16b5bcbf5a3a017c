"""What is kept of a class: nothing that keeps the class, which may hold a model in a closure."""

import gc
import weakref

import pytest
import torch

from memcallback.core.tensors import attributes, is_wrapper, tensors_in


def with_slots(held):
    class Batch:
        __slots__ = ("images", "labels")

        def read(self):
            return held

    return Batch


def plain(held):
    class Batch:
        def read(self):
            return held

    return Batch


@pytest.mark.parametrize("make_class", [plain, with_slots])
def test_a_class_is_let_go(make_class):
    held = torch.zeros(4)
    kind = make_class(held)
    batch = kind()
    batch.images = torch.ones(2)
    for _ in range(2):
        assert list(attributes(batch)) == ["images"]
        assert [tensor.shape for tensor in tensors_in(batch)] == [(2,)]
        assert not is_wrapper(kind)
    references = weakref.ref(kind), weakref.ref(held)
    del kind, batch, held
    gc.collect()
    assert [reference() for reference in references] == [None, None]
