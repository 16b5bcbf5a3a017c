from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from memcallback.core.tensors import storages_of, tensors_in
from memcallback.core.types import Category
from memcallback.step.holdings import holdings, written_storages

CPU = torch.device("cpu")


def split(model, *optimizers, batch=None):
    return holdings([model], optimizers, batch, CPU).by_category


def test_each_category_counts_its_storages():
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.BatchNorm1d(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(4, 10)
    model(batch).sum().backward()
    optimizer.step()
    parameters = (200 + 20 + 20) * 4
    assert split(model, optimizer, batch=batch) == {
        Category.PARAMETER: parameters,
        Category.BUFFER: (20 + 20) * 4 + 8,
        Category.GRADIENT: parameters,
        Category.OPTIMIZER_STATE: parameters,
        Category.INPUT: 4 * 10 * 4,
    }


def test_a_tied_weight_counts_once():
    first, second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    second.weight = first.weight
    assert split(nn.Sequential(first, second))[Category.PARAMETER] == 400


def test_views_of_one_storage_count_once_and_whole():
    whole = torch.ones(100, 10)
    assert split(nn.Identity(), batch=[whole[:10], whole[50:], whole])[Category.INPUT] == 4000


def test_storages_on_another_device_do_not_count():
    model = nn.Sequential(
        nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False, device="meta")
    )
    assert split(model)[Category.PARAMETER] == 400


def test_the_state_of_lbfgs_is_counted_in_its_lists():
    model = nn.Linear(10, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(5, 10)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert split(model, optimizer)[Category.OPTIMIZER_STATE] >= 2 * 40


def test_a_sparse_gradient_counts_its_indices_and_values():
    model = nn.Embedding(1000, 4, sparse=True)
    model(torch.tensor([3, 5])).sum().backward()
    assert split(model)[Category.GRADIENT] == 2 * 8 + 2 * 4 * 4


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


class Graph:
    def __init__(self):
        self.nodes = torch.ones(3)
        self.myself = self


Pair = namedtuple("Pair", ["left", "right"])


def test_tensors_are_found_in_any_nesting_once_each():
    graph = Graph()
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    batch = {
        "a": [one, (two, None, "text", 3)],
        "b": Sample(three, one),
        "c": graph,
        "d": Pair(two, {4}),
        "e": lambda: one,
    }
    assert [tensor.shape[0] for tensor in tensors_in(batch)] == [1, 2, 3, 1, 3, 2]


def test_a_lazy_parameter_has_no_storage_yet():
    assert split(nn.LazyLinear(10))[Category.PARAMETER] == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_tensor_in_compressed_rows_has_three_storages():
    compressed = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([0, 1, 2]),
        torch.ones(3),
        size=(3, 3),
        check_invariants=True,
    )
    assert len(list(storages_of(compressed))) == 3


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x):
        self.x = x


def test_tensors_are_found_in_slots():
    tensor = torch.zeros(3)
    assert list(tensors_in([Slotted(tensor)])) == [tensor]


def test_an_update_writes_what_is_trained_and_no_frozen_parameter_nor_buffer():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model[0].parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    weight, bias = model[0].weight, model[0].bias
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    assert written_storages([model], [optimizer]) == {
        tensor.data_ptr(): tensor.nbytes
        for tensor in (weight, bias, weight.grad, bias.grad, *state, model[1].bias)
    } | {model[1].bias.grad.data_ptr(): model[1].bias.grad.nbytes}
