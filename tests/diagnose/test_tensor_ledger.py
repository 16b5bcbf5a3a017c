"""Which operator, module and line made each storage that is still alive."""

import gc
import threading

import torch

from memcallback.core.torch_private import storage_id
from memcallback.diagnose.tensors.ledger import TensorLedger

CPU = torch.device("cpu")


def of(ledger, tensor):
    return ledger.creations.get(storage_id(tensor.untyped_storage()))


def test_a_storage_has_the_operator_the_shape_and_the_line_that_made_it():
    ledger = TensorLedger(CPU, [])
    before = torch.ones(3)
    with ledger.on():
        made = torch.ones(3, 5, dtype=torch.float64)
    after = torch.ones(3)
    creation = of(ledger, made)
    assert creation.operator == "aten::ones"
    assert (creation.shape, creation.dtype, creation.module) == ((3, 5), "float64", None)
    assert creation.at.text == "made = torch.ones(3, 5, dtype=torch.float64)"
    assert of(ledger, before) is None
    assert of(ledger, after) is None


def test_a_view_and_a_change_in_place_make_nothing():
    ledger = TensorLedger(CPU, [])
    with ledger.on():
        made = torch.ones(6)
        made.add_(1)
        view = made.view(2, 3)
        empty = torch.ones(0)
    assert of(ledger, view).operator == "aten::ones"
    assert of(ledger, empty) is None
    assert len(ledger.creations) == 1


def test_every_output_of_an_operator_is_recorded():
    ledger = TensorLedger(CPU, [])
    with ledger.on():
        values, indices = torch.ones(4).topk(2)
    assert of(ledger, values).operator == of(ledger, indices).operator == "aten::topk"
    assert of(ledger, indices).dtype == "int64"


def test_a_storage_that_is_gone_is_forgotten_and_its_number_may_come_again():
    ledger = TensorLedger(CPU, [])
    with ledger.on():
        gone, kept = torch.ones(1000), torch.zeros(1000)
        del gone
    gc.collect()
    assert [one.operator for one in ledger.creations.values()] == ["aten::zeros"]
    assert of(ledger, kept).reference() is kept.untyped_storage()


def test_storages_of_other_devices_are_left_out():
    ledger = TensorLedger(torch.device("meta"), [])
    with ledger.on():
        here, there = torch.ones(3), torch.ones(3, device="meta")
    assert of(ledger, here) is None
    assert of(ledger, there).operator == "aten::ones"


class Fails(torch.nn.Module):
    def forward(self, x):
        raise ValueError("not today")


def test_the_innermost_running_module_is_named_in_both_passes():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Tanh()))
    ledger = TensorLedger(CPU, [model])
    seen = []
    model[1][0].register_full_backward_pre_hook(lambda *_: seen.append("backward"))
    with ledger.on():
        output = model(torch.ones(2, 3))
        total = output.sum()
        total.backward()
    assert of(ledger, output).module == "1.0"
    assert of(ledger, output).operator == "aten::tanh"
    assert of(ledger, total).module is None
    gradient = of(ledger, model[0].weight.grad)
    assert gradient.module == "0"
    assert gradient.at.text == "total.backward()"
    assert seen == ["backward"]


def test_a_module_that_fails_is_left_and_no_hook_stays():
    model = torch.nn.Sequential(torch.nn.Identity(), Fails())
    ledger = TensorLedger(CPU, [model])
    with ledger.on():
        try:
            model(torch.ones(2))
        except ValueError:
            after = torch.ones(7)
    assert of(ledger, after).module is None
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_another_threads_operators_are_its_own():
    ledger, made = TensorLedger(CPU, []), []
    with ledger.on():
        thread = threading.Thread(target=lambda: made.append(torch.ones(9)))
        thread.start()
        thread.join()
    assert of(ledger, made[0]) is None
