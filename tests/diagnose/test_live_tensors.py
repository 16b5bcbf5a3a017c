import gc
import sys
import weakref

import pytest
import torch
from needs import needs_saved
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcallback.core.types import Category
from memcallback.diagnose.tensors.live import live_tensors
from memcallback.diagnose.tensors.saved import READS_SAVED

CPU = torch.device("cpu")


def live(*modules, optimizers=(), batch=None, frames=(), device=CPU):
    """The live tensors by owner; several storages of one owner are an error here."""
    found = [
        one for one in live_tensors(modules, optimizers, batch, device, frames=frames) if one.owner
    ]
    return {one.owner: one for one in found}


def network():
    return nn.Sequential(nn.Linear(1234, 40), nn.ReLU(), nn.Linear(40, 3))


def test_what_a_training_holds_has_the_names_that_a_person_gave_it():
    model = network()
    model.register_buffer("mean", torch.ones(1234))
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(7, 1234)
    model(batch).sum().backward()
    optimizer.step()
    found = live(model, optimizers=[optimizer], batch=batch)
    weight = found["0.weight"]
    assert (weight.size_bytes, weight.shape, weight.dtype, weight.category, weight.module) == (
        *(40 * 1234 * 4, (40, 1234), "float32", Category.PARAMETER, "0"),
    )
    assert weight.address == model[0].weight.data_ptr()
    assert (found["mean"].category, found["mean"].module) == (Category.BUFFER, "")
    assert (found["gradient of 2.bias"].category, found["gradient of 2.bias"].module) == (
        Category.GRADIENT,
        "2",
    )
    assert (found["exp_avg of 0.weight"].category, found["exp_avg of 0.weight"].shape) == (
        Category.OPTIMIZER_STATE,
        (40, 1234),
    )
    assert (found["input"].category, found["input"].size_bytes) == (Category.INPUT, 7 * 1234 * 4)


def test_the_largest_comes_first():
    sizes = [one.size_bytes for one in live_tensors([network()], (), None, CPU)]
    assert sizes == sorted(sizes, reverse=True)


def test_a_tied_weight_and_a_view_count_once():
    model = network()
    tied = nn.Sequential(model[2], nn.Linear(40, 3))
    tied[1].weight = model[2].weight
    view = model[0].weight[:10]
    found = live_tensors([tied, model], (), view, CPU)
    addresses = [one.address for one in found]
    assert len(addresses) == len(set(addresses))
    assert "input" not in {one.owner for one in found}


def test_a_view_is_described_by_the_tensor_that_has_most_of_the_storage():
    batch = torch.ones(1234, 5)
    assert live(batch=[batch[:2], batch])["input"].shape == (1234, 5)


def test_several_models_are_told_apart():
    found = live(nn.Linear(1234, 2), nn.Bilinear(1234, 2, 2))
    assert {"weight of Linear", "weight of Bilinear"} <= found.keys()


@needs_saved
def test_what_is_saved_for_backward_is_an_activation_of_the_module_that_saved_it():
    model = network()
    loss = model(torch.ones(7, 1234)).sum()
    found = live(model)
    saved = found["saved for AddmmBackward0 of 2"]
    assert (saved.size_bytes, saved.shape, saved.category, saved.module) == (
        7 * 40 * 4,
        (7, 40),
        Category.ACTIVATION,
        "2",
    )
    assert found["saved for AddmmBackward0 of 0"].shape == (7, 1234)
    loss.backward()
    assert not [
        owner for owner in live(model) if owner.startswith("saved for") and " of 0" in owner
    ]


@needs_saved
def test_the_weight_of_two_modules_tells_neither():
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.ReLU(), nn.Linear(40, 40, bias=False))
    model[2].weight = model[0].weight
    loss = model(torch.ones(1234, 40, requires_grad=True)).sum()
    modules = {
        one.module for one in live_tensors([model], (), None, CPU) if one.shape == (1234, 40)
    }
    assert modules == {None}
    del loss


@needs_saved
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_not_computed_again(use_reentrant):
    calls = []

    class Counted(nn.Linear):
        def forward(self, features):
            calls.append(1)
            return super().forward(features)

    model = Counted(1234, 40)
    loss = checkpoint(
        model, torch.ones(7, 1234, requires_grad=True), use_reentrant=use_reentrant
    ).sum()
    live_tensors([model], (), None, CPU)
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


@needs_saved
def test_what_hooks_packed_is_found_and_not_unpacked():
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (1, tensor.clone()), unpacked.append
    ):
        result = torch.ones(1234, requires_grad=True).exp()
    found = live()
    assert found["saved for ExpBackward0"].shape == (1234,)
    assert unpacked == []
    del result


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        ctx.save_for_backward(values.square())
        ctx.kept = values.exp()
        return values * 2

    @staticmethod
    def backward(ctx, gradients):
        return gradients * ctx.kept


def test_what_a_function_of_the_users_keeps_is_found_until_the_graph_is_gone():
    result = Scale.apply(torch.ones(1234, requires_grad=True))
    assert live()["attribute 'kept' of ScaleBackward"].category is Category.ACTIVATION
    if READS_SAVED:
        assert live()["saved for ScaleBackward"].shape == (1234,)
    result.sum().backward()
    assert "saved for ScaleBackward" not in live()  # asking for it is an error of PyTorch's now
    del result


def test_local_variables_and_what_is_in_them_have_their_names():
    class Statistics:
        def __init__(self):
            self.sums = {"a": torch.ones(1234)}

    losses, deep, statistics = (
        [torch.ones(5) for _ in range(3)],
        {"x": ([torch.ones(6)],)},
        Statistics(),
    )
    found = live_tensors((), (), None, CPU, frames=[sys._getframe()])
    here = "in test_local_variables_and_what_is_in_them_have_their_names() of test_live_tensors.py"
    by_owner = {}
    for one in found:
        by_owner.setdefault(one.owner, []).append(one)
    assert len(by_owner[f"local variable 'losses' {here}"]) == 3
    assert by_owner[f"local variable 'deep' {here}"][0].shape == (6,)
    assert by_owner[f"local variable 'statistics.sums' {here}"][0].shape == (1234,)
    del losses, deep, statistics


AT_THE_TOP = torch.ones(1234)


def test_a_variable_of_the_users_file_has_its_name():
    assert live(frames=[sys._getframe()])[
        "variable 'AT_THE_TOP' in test_live_tensors.py"
    ].shape == (1234,)


def test_models_and_optimizers_in_variables_count_as_if_they_were_given():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(7, 1234)).sum().backward()
    optimizer.step()
    found = live(frames=[sys._getframe()])
    assert found["0.weight"].category is Category.PARAMETER
    assert found["momentum_buffer of 0.weight"].category is Category.OPTIMIZER_STATE
    other = nn.Linear(1234, 1)
    assert {"0.weight of model", "weight of other"} <= live(frames=[sys._getframe()]).keys()
    # The given one names its parameters, whatever variable has it too.
    assert {"0.weight", "weight of other"} <= live(model, frames=[sys._getframe()]).keys()
    del other


def test_an_optimizer_without_a_model_has_parameters():
    weight = nn.Parameter(torch.ones(1234))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    found = live(optimizers=[optimizer])
    assert found["parameter 0 of SGD"].category is Category.PARAMETER
    assert found["gradient of parameter 0 of SGD"].category is Category.GRADIENT
    assert found["momentum_buffer of parameter 0 of SGD"].category is Category.OPTIMIZER_STATE


def test_an_attribute_of_a_module_has_its_name():
    model = network()
    model[1].cache = {"keys": [torch.ones(1234)]}
    model.last = torch.ones(1235)
    found = live(model)
    assert (
        found["attribute 'cache' of module '1'"].module,
        found["attribute 'cache' of module '1'"].category,
    ) == ("1", None)
    assert found["attribute 'last' of the root module"].shape == (1235,)


def test_the_gradient_of_a_variable_has_its_name():
    weight = torch.ones(1234, requires_grad=True)
    weight.square().sum().backward()
    owner = (
        "gradient of local variable 'weight' in test_the_gradient_of_a_variable_has_its_name() of "
        "test_live_tensors.py"
    )
    assert live(frames=[sys._getframe()])[owner].category is Category.GRADIENT


def test_other_devices_and_tensors_without_memory_are_left_out():
    nothing = [torch.ones(1234, device="meta"), torch.empty(0), nn.LazyLinear(5)]
    with torch._subclasses.FakeTensorMode():
        nothing.append(torch.ones(1234))
    here = live_tensors((), (), nothing, CPU)
    assert "input" not in {one.owner for one in here}


class Liar:
    @property
    def __class__(self):
        raise RuntimeError("I have no class")

    def __getattr__(self, name):
        raise RuntimeError("nor attributes")

    def __iter__(self):
        raise RuntimeError("nor items")

    def __eq__(self, other):
        raise RuntimeError("nor equals")

    __hash__ = None


class Broken(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("not to be touched")


def test_objects_that_misbehave_are_survived():
    liar = Liar()
    broken = torch.ones(1234).as_subclass(Broken)
    values = torch.ones(1235)
    found = live(batch=[values], frames=[sys._getframe()])
    assert found["input"].shape == (1235,)
    assert any(owner.startswith("local variable 'broken'") for owner in found)
    del liar, broken


class Unfinished(nn.Module):
    def __init__(self):
        pass


def test_a_module_that_is_not_initialised_is_survived():
    unfinished = Unfinished()
    assert "0.weight of Sequential" in live(network(), unfinished, frames=[sys._getframe()])


def test_no_autograd_node_is_made_for_a_view_that_was_written_into():
    base = torch.ones(1234, requires_grad=True) * 2
    first, stale = base[:5], base[5:]
    first.mul_(3)
    before = torch._C._autograd._get_sequence_nr()
    live(frames=[sys._getframe()])
    assert torch._C._autograd._get_sequence_nr() == before
    assert stale.grad_fn is not None
    assert torch._C._autograd._get_sequence_nr() > before


def test_nothing_is_kept_alive():
    def hold():
        values = torch.ones(1234)
        reference = weakref.ref(values.untyped_storage())
        found = live_tensors((), (), None, CPU, frames=[sys._getframe()])
        assert any(one.owner.startswith("local variable 'values'") for one in found)
        assert reference() is not None
        del values
        # The function still runs: its frame must not have kept what the variable held.
        return reference() is None, found

    gc.disable()
    try:
        is_gone, _ = hold()
    finally:
        gc.enable()
    assert is_gone


def test_the_frames_of_an_error_let_go_of_what_they_held():
    def fail():
        values = torch.ones(1234)
        references.append(weakref.ref(values.untyped_storage()))
        raise ValueError("out")

    references = []
    try:
        fail()
    except ValueError as error:
        frame = error.__traceback__.tb_next.tb_frame
        assert any(
            one.owner.startswith("local variable 'values'")
            for one in live_tensors((), (), None, CPU, frames=[frame])
        )
        frame.clear()
        assert references[0]() is None


def test_locals_that_the_program_asked_for_stay_as_they_are():
    values = torch.ones(1234)
    mine = locals()
    mine["of_the_program"] = frame = sys._getframe()
    live_tensors((), (), None, CPU, frames=[frame])
    assert mine["values"] is values
    assert "frame" not in mine


def test_a_debugger_does_not_lose_its_variables():
    seen = []

    def traced():
        values = torch.ones(3)
        live_tensors((), (), None, CPU, frames=[sys._getframe()])
        seen.append(values.sum().item())

    before = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        traced()
    finally:
        sys.settrace(before)
    assert seen == [3.0]


@pytest.mark.cuda
def test_what_lies_on_a_full_device_is_found_without_allocating():
    gc.collect()
    torch.cuda.empty_cache()  # what other tests have left would give room
    device = torch.device("cuda")
    model = network().to(device)
    batch = torch.ones(7, 1234, device=device)
    loss = model(batch).sum()
    free, _ = torch.cuda.mem_get_info()
    fillers = [torch.empty(free - (64 << 20), dtype=torch.uint8, device=device)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 << 20, dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    found = live(model, batch=batch, frames=[sys._getframe()], device=device)
    assert torch.cuda.max_memory_allocated() == allocated
    assert found["input"].shape == (7, 1234)
    assert found["saved for AddmmBackward0 of 2"].category is Category.ACTIVATION
    (filler,) = (
        one for owner, one in found.items() if owner.startswith("local variable 'fillers'")
    )
    assert filler.size_bytes == free - (64 << 20)
    # Beyond what is known there are the workspaces of matrix products alone.
    rounded = sum(
        -(-one.size_bytes // 512) * 512
        for one in live_tensors([model], (), batch, device, frames=[sys._getframe()])
    )
    assert 0 <= allocated - rounded <= 2 * (33 << 20)
    del loss, fillers


@pytest.mark.cuda
def test_what_lies_on_the_host_is_not_on_the_device():
    values = torch.ones(1234)
    assert not [
        owner
        for owner in live(frames=[sys._getframe()], device=torch.device("cuda"))
        if "'values'" in owner
    ]
    assert [owner for owner in live(frames=[sys._getframe()]) if "'values'" in owner]
    del values


def test_long_collections_of_names_and_numbers_do_not_hide_what_comes_after_them():
    first, second, third = (
        [f"{number} {word}" for number in range(50_000)] for word in ("a", "b", "c")
    )
    numbers, more = {number: float(number) for number in range(100_000)}, set(range(70_000))
    history = [torch.ones(4321)]
    (found,) = (
        one
        for one in live_tensors((), (), None, torch.device("cpu"), frames=[sys._getframe()])
        if one.shape == (4321,)
    )
    assert "'history'" in found.owner
    assert len(first) == len(second) == len(third) < len(more) < len(numbers)
    assert len(history) == 1


def test_what_was_cut_short_below_one_variable_is_found_below_another():
    large = {"objects": [[number] for number in range(19_999)], "held": [[torch.ones(5432)]]}
    small = {"held": large["held"]}
    (found,) = (
        one
        for one in live_tensors((), (), None, torch.device("cpu"), frames=[sys._getframe()])
        if one.shape == (5432,)
    )
    assert "'small'" in found.owner
    assert large["held"] is small["held"]
