"""Private parts of PyTorch in a process of our own: what stands for one that is missing."""

import sys
import types

import pytest
import torch

import memcallback as mc
from memcallback.core import torch_private
from memcallback.core.torch_private import PARTS, replaced, require


@pytest.fixture
def owner(monkeypatch):
    """A module with a function that a part of ours names."""
    module = types.ModuleType("torch.of_a_test")
    module.doubled = lambda x: 2 * x
    monkeypatch.setitem(sys.modules, "torch.of_a_test", module)
    monkeypatch.setattr(torch, "of_a_test", module, raising=False)
    monkeypatch.setitem(
        PARTS, "doubled", torch_private._Part("torch.of_a_test", "doubled", "this test")
    )
    monkeypatch.setitem(
        PARTS, "gone", torch_private._Part("torch.of_a_test", "gone", "this test", lambda x: x)
    )
    monkeypatch.setitem(PARTS, "lost", torch_private._Part("torch.of_a_test", "lost", "this test"))
    yield module
    for name in ("doubled", "gone", "lost"):
        vars(torch_private).pop(name, None)


def test_a_part_is_looked_up_and_replaced_by_its_fallback_or_a_stand_in(owner):
    assert torch_private.doubled is owner.doubled
    assert torch_private.gone(3) == 3
    assert vars(torch_private)["doubled"] is owner.doubled
    with pytest.raises(
        mc.PredictionError, match=r"has no torch\.of_a_test\.lost \(needed for this"
    ):
        torch_private.lost(3)
    with pytest.raises(AttributeError, match="has no attribute 'never'"):
        _ = torch_private.never


def test_a_missing_part_is_told_where_it_is_required_and_one_with_a_fallback_is_not(owner):
    require("doubled", "gone")
    with pytest.raises(mc.PredictionError, match="lost"):
        require("doubled", "lost")


def test_a_function_is_replaced_for_as_long_as_it_is_asked_for(owner):
    before = owner.doubled
    with replaced("doubled", lambda original: lambda x: original(x) + 1):
        assert owner.doubled(3) == 7
    assert owner.doubled is before


def test_a_replacement_of_somebody_else_stays(owner):
    def theirs(x):
        return x

    with replaced("doubled", lambda original: lambda x: original(x) + 1):
        owner.doubled = theirs
    assert owner.doubled is theirs


def test_a_missing_function_with_a_fallback_is_not_replaced_and_another_is_told(owner):
    with replaced("gone", lambda original: pytest.fail("made of nothing")):
        assert not hasattr(owner, "gone")
    with pytest.raises(mc.PredictionError, match="lost"), replaced("lost", lambda original: None):
        pass


def test_a_profile_of_any_thread_is_seen():
    assert torch_private.is_any_profiler_on() is False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_any_profiler_on() is True


def test_a_subclass_that_wraps_tensors_is_known_by_its_methods():
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            return None

    is_wrapper = PARTS["is_traceable_wrapper_subclass"].fallback
    wrapped = torch.ones(2).as_subclass(Wrapper)
    assert is_wrapper(wrapped) is True
    assert is_wrapper(torch.ones(2)) is False
    assert is_wrapper(Wrapper) is False


def test_without_the_counts_of_modes_there_are_none():
    assert PARTS["num_dispatch_modes"].fallback() == PARTS["num_function_modes"].fallback() == 0


def test_views_know_their_base_and_storages_their_number():
    base = torch.ones(4)
    assert torch_private.base_of(base[1:]) is base
    assert torch_private.base_of(base) is base
    number = torch_private.storage_id(base.untyped_storage())
    assert number == torch_private.storage_id(base[1:].untyped_storage())
    assert number != torch_private.storage_id(torch.ones(4).untyped_storage())


def test_autograd_numbers_its_nodes_in_order():
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    second = first * 2
    numbers = [torch_private.sequence_nr(y.grad_fn) for y in (first, second)]
    assert numbers[1] == numbers[0] + 1
    assert torch_private.schema_of(torch.ops.aten.mm.default).name == "aten::mm"


def test_the_reporter_of_a_cpus_memory_is_at_one_address():
    address = torch_private.cpu_reporter_address()
    if sys.platform == "linux":
        assert address > 0
    assert torch_private.cpu_reporter_address() == address


def test_a_process_that_refuses_cuda_fails_before_the_driver_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", torch.cuda._is_in_bad_fork)
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    torch_private.refuse_cuda()
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        torch.cuda.init()


def test_a_part_of_a_module_that_nobody_has_imported_is_imported(monkeypatch):
    monkeypatch.setitem(
        PARTS, "of_a_test", torch_private._Part("torch.utils.bundled_inputs", "bundle_inputs", "")
    )
    monkeypatch.delitem(sys.modules, "torch.utils.bundled_inputs", raising=False)
    monkeypatch.delattr(torch.utils, "bundled_inputs", raising=False)
    assert torch_private.of_a_test is torch.utils.bundled_inputs.bundle_inputs
    vars(torch_private).pop("of_a_test")
