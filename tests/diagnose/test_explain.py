"""What is said of an error before its frames go: place, request, batch and what was live."""

import sys

import torch
from hand_made import traced_step

from memcallback.devices.catalogue import find_device
from memcallback.diagnose.out_of_memory.context import OomContext
from memcallback.diagnose.out_of_memory.explain import explain
from memcallback.prediction.allocator.settings import AllocatorSettings
from memcallback.prediction.batch_trace import BatchTrace
from memcallback.prediction.prediction import Prediction

HOST = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: "


def host_error(num_bytes=123_456):
    return RuntimeError(f"{HOST}you tried to allocate {num_bytes} bytes. Error code 12")


def explained(call, **changes):
    """The report on the error that a call raises."""
    values = {"device": torch.device("cpu"), "phase": "forward pass", "step": 7}
    try:
        call()
    except BaseException as error:
        return explain(error, OomContext(**(values | changes)))
    raise AssertionError("it did not fail")


def fail(*_arguments, error=None):
    raise host_error() if error is None else error


def test_the_request_and_the_first_line_of_the_message_are_told():
    report = explained(
        lambda: fail(error=RuntimeError(f"\n\n{HOST}you tried to allocate 77 bytes\nx"))
    )
    assert report.shortage.requested_bytes == 77
    assert report.error == f"{HOST}you tried to allocate 77 bytes"
    assert report.device_name == "CPU"


def test_a_request_of_a_device_is_read_with_its_unit():
    report = explained(
        lambda: fail(
            error=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        )
    )
    assert report.shortage.requested_bytes == 2 << 30


def test_an_error_without_a_message_has_the_name_of_its_class():
    report = explained(lambda: fail(error=MemoryError()))
    assert report.error == "MemoryError"
    assert report.shortage.requested_bytes is None


def test_the_place_has_the_step_the_phase_the_line_and_the_call():
    report = explained(lambda: fail(1, 2, 3))
    assert (report.place.step, report.place.phase) == (7, "forward pass")
    assert report.place.line.function == "fail"
    assert report.place.module is None


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return fail(self.linear(x))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        return fail()


def test_the_module_is_the_innermost_that_ran():
    model = torch.nn.Sequential(torch.nn.Identity(), Layer())
    report = explained(lambda: model(torch.ones(1, 2)), modules=[model])
    assert report.place.module == "1"
    elsewhere = explained(lambda: model(torch.ones(1, 2)), modules=[torch.nn.Linear(1, 1)])
    assert elsewhere.place.module is None


def test_in_an_optimizer_no_module_is_running():
    model = Layer()
    optimizer = Optimizer(model.parameters(), lr=0.1)

    class Loop(torch.nn.Module):
        def run(self):
            optimizer.step()

    loop = Loop()
    report = explained(loop.run, modules=[loop], optimizers=[optimizer])
    assert report.place.module is None


def test_a_long_expression_is_cut_and_arguments_are_left_out():
    def short():
        return torch.ones(2).reshape(3, 5)

    # Before Python 3.11 no traceback says which expression of a line it was.
    whole = "return torch.ones(2).reshape(3, 5)"
    assert explained(short).place.operator == (
        "torch.ones" if sys.version_info >= (3, 11) else whole
    )

    def long():
        names = {}
        return names["a very long name of something that is not there at all, and then some more"]

    operator = explained(long).place.operator
    assert operator.endswith("...")
    assert len(operator) == 63


def test_the_batch_is_the_variable_of_the_innermost_frame_that_has_tensors():
    def inner(batch):
        fail()

    def outer():
        batch = {"image": torch.ones(5, 3), "label": torch.zeros(5, dtype=torch.int64)}
        inner("no tensors")
        return batch

    report = explained(outer)
    assert report.batch == (("['image']", (5, 3), "float32"), ("['label']", (5,), "int64"))
    assert report.batch_size == 5
    given = explained(outer, batch=torch.ones(9, 2), batch_size=4)
    assert given.batch == (("batch", (9, 2), "float32"),)
    assert given.batch_size == 4


def test_what_is_live_is_added_up_by_category():
    # What other tests have left.
    before = dict(explained(fail).by_category)
    model = torch.nn.Linear(1000, 3, bias=False)
    model.register_buffer("seen", torch.zeros(200))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    report = explained(fail, modules=[model], optimizers=[optimizer], batch=torch.ones(100, 1000))
    sums = {name: size - before.get(name, 0) for name, size in report.by_category}
    assert sums["parameters"] == sums["gradients"] == sums["optimizer state"] == 12_000
    assert (sums["buffers"], sums["input"]) == (800, 400_000)
    assert list(sums)[:5] == ["parameters", "buffers", "gradients", "optimizer state", "input"]
    assert report.num_tensors >= 5
    assert report.tensors[0].size_bytes == max(one.size_bytes for one in report.tensors)


def test_a_prediction_that_knows_one_size_says_nothing_of_another():
    of_four = Prediction.of(
        BatchTrace.single(traced_step(4)), find_device("cpu"), settings=AllocatorSettings()
    )
    same = explained(fail, prediction=of_four, batch=torch.ones(4, 2))
    assert same.expected.peak_allocated_bytes == of_four.peak_allocated_bytes
    assert same.notes == ()
    other = explained(fail, prediction=of_four, batch=torch.ones(9, 2))
    assert other.expected is None
    assert other.notes == ("There is no prediction for batch size 9.",)
    assert explained(fail).expected is None
