from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

import memcallback
from memcallback.step.copies import objects
from memcallback.step.copies.modes import untouched_globals
from memcallback.step.copies.objects import fake_copy
from memcallback.step.copies.resizing import resize_batch

PETABYTE = 10**15


@dataclass
class Helper:
    generator: torch.Generator


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def assert_like(fake: torch.Tensor, real: torch.Tensor) -> None:
    assert isinstance(fake, FakeTensor)
    assert fake.device == torch.device("cpu")
    assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == (
        real.shape,
        real.stride(),
        real.dtype,
        real.requires_grad,
    )


@pytest.mark.parametrize(
    "real",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, 1).expand(3, 7),
        torch.zeros(10)[2:5],
        torch.zeros((), dtype=torch.int64),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.zeros(3, dtype=torch.complex64, requires_grad=True),
        torch.zeros(3, requires_grad=True) * 2,
        torch.zeros(5, device="meta"),
    ],
    ids=[
        "contiguous",
        "transposed",
        "channels last",
        "expanded",
        "slice",
        "scalar",
        "empty",
        "complex",
        "not a leaf",
        "meta",
    ],
)
def test_a_fake_has_the_shape_strides_dtype_and_requires_grad_of_its_tensor_on_the_cpu(real, mode):
    assert_like(fake_copy(real, mode), real)


def test_a_module_keeps_its_parameters_as_parameters_and_its_buffers(mode):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[0].weight.requires_grad_(False)
    copy = fake_copy(model, mode)
    assert [name for name, _ in copy.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    for fake, real in zip(
        (*copy.parameters(), *copy.buffers()), (*model.parameters(), *model.buffers()), strict=True
    ):
        assert_like(fake, real)
        assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)


def test_nothing_of_the_original_is_changed(mode):
    model = nn.Sequential(nn.Linear(3, 3))
    before = {name: (id(value), value.clone()) for name, value in model.named_parameters()}
    copy = fake_copy(model, mode)
    with mode:
        copy(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(copy.parameters(), lr=0.1).step()
    for name, value in model.named_parameters():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
        assert value.grad is None


def test_gradients_are_left_behind(mode):
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).sum().backward()
    assert fake_copy(model, mode).weight.grad is None


def test_no_data_is_copied_so_a_petabyte_takes_no_memory(mode):
    batch = {"huge": torch.empty(PETABYTE, dtype=torch.uint8, device="meta")}
    fake = fake_copy(batch, mode)["huge"]
    assert fake.untyped_storage().nbytes() == PETABYTE
    assert resize_batch({"huge": fake}, PETABYTE, 2 * PETABYTE)["huge"].shape == (2 * PETABYTE,)


def test_copying_runs_no_operator_on_parameters_and_large_tensors(mode):
    model = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    batch = torch.ones(70_000)
    holder = {"model": model, "loose": [nn.Parameter(torch.ones(7))], "batch": batch}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        fake_copy(holder, mode)
    assert not [
        event.key
        for event in profile.key_averages()
        if event.key in ("aten::clone", "aten::copy_", "aten::empty_like")
    ]


def test_tied_weights_stay_tied(mode):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model.extra = [model["a"].weight]
    copy = fake_copy(model, mode)
    assert copy["a"].weight is copy["b"].weight is copy.extra[0]


def test_tensors_on_one_storage_stay_on_one_storage(mode):
    flat = torch.zeros(100)
    batch = fake_copy([flat[:50], flat[50:], torch.zeros(100)], mode)
    first, second, other = (tensor.untyped_storage() for tensor in batch)
    assert first._cdata == second._cdata != other._cdata
    assert first.nbytes() == 400


def test_what_two_objects_share_they_share_in_a_copy_of_both(mode):
    model = nn.Linear(3, 3)
    copy, batch = fake_copy((model, {"weight": model.weight}), mode)
    assert batch["weight"] is copy.weight


Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Sample:
    image: torch.Tensor
    name: str


class Custom:
    def __init__(self, image: torch.Tensor) -> None:
        self.image = image


def test_batches_of_any_make_are_copied_and_resized(mode):
    x = torch.zeros(4, 3)
    batch = {
        "list": [x.clone()],
        "tuple": (x.clone(), "text"),
        "named": Pair(x.clone(), 7),
        "data": Sample(x.clone(), "cat"),
        "own": Custom(x.clone()),
        "n": 4,
    }
    resized = resize_batch(fake_copy(batch, mode), 4, 9)
    found = [
        resized["list"][0],
        resized["tuple"][0],
        resized["named"].image,
        resized["data"].image,
        resized["own"].image,
    ]
    assert all(isinstance(tensor, FakeTensor) and tensor.shape == (9, 3) for tensor in found)
    assert type(resized["named"]) is Pair
    assert (resized["tuple"][1], resized["named"].label, resized["data"].name, resized["n"]) == (
        "text",
        7,
        "cat",
        4,
    )


def test_only_tensors_with_the_batch_size_first_are_resized(mode):
    batch = fake_copy(
        {"x": torch.zeros(4, 3), "classes": torch.zeros(10), "scalar": torch.zeros(())}, mode
    )
    resized = resize_batch(batch, 4, 8)
    assert [tuple(tensor.shape) for tensor in resized.values()] == [(8, 3), (10,), ()]
    assert batch["x"].shape == (4, 3)


def test_dimensions_as_long_as_the_sequences_are_resized_where_asked(mode):
    batch = {
        "ids": torch.zeros(4, 6),
        "mask": torch.zeros(4, 1, 6, 6),
        "places": torch.zeros(6),
        "square": torch.zeros(6, 4),
        "x": torch.zeros(()),
    }
    resized = resize_batch(fake_copy(batch, mode), 4, 9, lengths=(6, 8))
    assert [tuple(tensor.shape) for tensor in resized.values()] == [
        (9, 8),
        (9, 1, 8, 8),
        (6,),
        (6, 4),
        (),
    ]
    turned = resize_batch(
        fake_copy(torch.zeros(4, 3, 6).transpose(1, 2), mode), 4, 4, lengths=(6, 8)
    )
    assert (turned.shape, turned.stride()) == ((4, 8, 3), (24, 1, 8))


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(4, 3, 5, 5), (75, 25, 5, 1)),
        (torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last), (75, 1, 15, 3)),
        (torch.zeros(3, 4).t(), (1, 8)),
        (torch.zeros(4, 1, 3).expand(4, 7, 3), (3, 0, 1)),
    ],
    ids=["contiguous", "channels last", "batch innermost", "expanded"],
)
def test_a_resized_tensor_keeps_the_order_of_its_dimensions_in_memory(tensor, strides, mode):
    resized = resize_batch(fake_copy(tensor.requires_grad_(), mode), 4, 8)
    assert resized.shape[0] == 8
    assert resized.stride() == strides
    assert resized.requires_grad


def test_a_negative_batch_size_is_refused(mode):
    with pytest.raises(
        ValueError, match="new_batch_size is a number of samples and cannot be negative, got -1"
    ):
        resize_batch([], 4, -1)


class SmallModule(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning"
)  # Lightning 2.6 uses it
def test_a_lightning_module_is_copied_without_its_trainer_wherever_it_refers_to_it(mode, tmp_path):
    module = SmallModule()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module.notes = {"trainer": trainer}
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(4, 4)), batch_size=2))
    copy = fake_copy(module, mode)
    assert copy._trainer is None
    assert copy.notes == {"trainer": None}
    assert module.trainer is trainer
    with mode:
        assert copy.training_step([torch.zeros(5, 4)], 0).shape == ()


def test_every_device_that_a_module_remembers_becomes_the_cpu(mode):
    module = SmallModule()
    module._device = torch.device("cuda", 0)
    module.linear.where = torch.device("cuda:1")
    copy = fake_copy(module, mode)
    assert copy.device == copy.linear.where == torch.device("cpu")
    assert module._device == torch.device("cuda:0")


def test_lightning_is_not_imported():
    code = (
        "import sys, memcallback.step.copies.objects; sys.exit(any(name.split('.')[0] in "
        "('lightning', 'pytorch_lightning') for name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(memcallback.__file__).parents[1])}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


def test_what_cannot_be_copied_is_shared_and_what_holds_it_is_copied(mode, tmp_path):
    model = nn.Linear(3, 3)
    with open(tmp_path / "log.txt", "w") as file:
        model.helper = {
            "lock": threading.Lock(),
            "file": file,
            "generator": (i for i in range(3)),
            "tensor": torch.zeros(3),
        }
        copy = fake_copy(model, mode)
        assert copy.helper is not model.helper
        for name in ("lock", "file", "generator"):
            assert copy.helper[name] is model.helper[name]
        assert isinstance(copy.helper["tensor"], FakeTensor)


def test_a_random_generator_is_copied_with_its_state_and_goes_its_own_way(mode):
    model = nn.Linear(3, 3)
    model.generator = torch.Generator().manual_seed(3)
    model.helper = Helper(torch.Generator().manual_seed(4))
    own = (model.generator, model.helper.generator)
    copy = fake_copy(model, mode)
    copies = (copy.generator, copy.helper.generator)
    states = [generator.get_state() for generator in own]
    for generator, copied, state in zip(own, copies, states, strict=True):
        assert torch.equal(copied.get_state(), state)
        copied.manual_seed(5)
        assert torch.equal(generator.get_state(), state)


def test_in_a_process_of_its_own_large_plain_data_is_shared_and_looked_through_once(
    mode, monkeypatch
):
    monkeypatch.setattr(objects, "is_in_child", lambda: True)
    looked, is_plain = [], objects._is_plain
    monkeypatch.setattr(objects, "_is_plain", lambda one: looked.append(one) or is_plain(one))
    module = nn.Linear(2, 2)
    module.rows = [(number, str(number)) for number in range(20_000)]
    for _ in range(3):
        assert fake_copy(module, mode).rows is module.rows
    # Each row, and the list itself, beside what is in the rows.
    assert len(looked) == len(set(map(id, looked)))
    module.rows.append(torch.ones(2))
    assert isinstance(fake_copy(module, mode).rows[-1], FakeTensor)


def test_a_large_container_that_gets_a_tensor_is_copied(mode, monkeypatch):
    monkeypatch.setattr(objects, "is_in_child", lambda: True)
    module = nn.Linear(2, 2)
    module.bank = [None] * 20_000
    assert fake_copy(module, mode).bank is module.bank
    module.bank[3] = torch.ones(2)
    assert isinstance(fake_copy(module, mode).bank[3], FakeTensor)


def test_a_dataset_and_a_data_loader_of_a_module_are_shared(mode):
    model = nn.Linear(3, 3)
    model.dataset = TensorDataset(torch.zeros(5))
    model.loader = DataLoader(model.dataset)
    copy = fake_copy(model, mode)
    assert copy.dataset is model.dataset
    assert copy.loader is model.loader


def test_a_module_that_refuses_to_be_copied_is_named(mode):
    class Stubborn(nn.Module):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with pytest.raises(
        ValueError, match=r"class Stubborn cannot be copied \(no copies\). Give it a __deepcopy__"
    ):
        fake_copy(nn.Sequential(Stubborn()), mode)


def test_a_module_that_is_made_from_an_argument_is_copied_with_all_that_it_holds(mode):
    class Average(nn.Module):
        """As in ema_pytorch: `copy.deepcopy` fails."""

        def __new__(cls, model):
            return super().__new__(cls)

        def __init__(self, model):
            super().__init__()
            self.average = nn.Linear(3, 3)
            self.model = [model]

    model = nn.Linear(3, 3)
    copy, average = fake_copy((model, Average(model)), mode)
    assert type(average) is Average
    assert isinstance(average.average.weight, FakeTensor)
    assert average.model[0] is copy


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_parametrized_and_weight_normalised_modules_run_as_copies(mode):
    old = nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        old,
    )
    copy = fake_copy(model, mode)
    with mode:
        assert copy(torch.zeros(5, 4)).shape == (5, 4)
    assert not isinstance(model[0].weight, FakeTensor)


def test_recurrent_modules_run_as_copies(mode):
    copy = fake_copy(nn.LSTM(3, 4), mode)
    with mode:
        assert copy(torch.zeros(5, 2, 3))[0].shape == (5, 2, 4)


class TracedAgain(nn.Module):
    """Makes its graph when its state is set, as modules of e3nn do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.make()

    def make(self):
        root = nn.Module()
        root.weight = self.weight
        graph = torch.fx.Graph()
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        x, weight = (
            torch.fx.Proxy(node, tracer)
            for node in (graph.placeholder("x"), graph.get_attr("weight"))
        )
        graph.output(torch.cat([x * weight, x]).node)
        self.graph = torch.fx.GraphModule(root, graph)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.make()

    def forward(self, x):
        return self.graph(x)


def test_a_module_that_traces_its_graph_again_is_copied(mode):
    copy = fake_copy(TracedAgain(), mode)
    with mode:
        assert copy(torch.ones(3)).shape == (6,)


def test_a_compiled_module_is_copied_as_the_module_that_it_wraps(mode):
    inner = torch.compile(nn.Linear(3, 3), backend="eager")
    in_place = nn.Linear(3, 3)
    in_place.compile(backend="eager")
    copy = fake_copy(torch.compile(nn.Sequential(inner, in_place), backend="eager"), mode)
    assert type(copy) is nn.Sequential
    assert type(copy[0]) is nn.Linear
    assert copy[1]._compiled_call_impl is None
    assert in_place._compiled_call_impl is not None
    with untouched_globals(), mode:
        assert copy(torch.zeros(2, 3)).shape == (2, 3)


class Labelled(torch.Tensor):
    """A subclass without a dispatch of its own."""


def test_a_subclass_that_only_adds_methods_becomes_a_plain_fake(mode):
    real = torch.zeros(3, 4).as_subclass(Labelled)
    assert_like(fake_copy(real, mode), real)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_tensor_has_fake_indices_and_values(mode):
    real = torch.eye(6)[:4].to_sparse()
    copy, again = fake_copy((real, real), mode)
    assert copy is again
    assert (copy.layout, copy.shape, copy.is_coalesced(), copy._nnz()) == (
        torch.sparse_coo,
        (4, 6),
        True,
        4,
    )
    assert isinstance(copy._indices(), FakeTensor)
    assert copy._values().shape == (4,)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_batch_has_as_many_elements_for_each_further_sample(mode):
    real = torch.ones(4, 3)
    real[0, 0] = 0  # 11 elements: 3 for a sample
    for size, count in ((6, 17), (3, 8)):
        resized = resize_batch(fake_copy(real.to_sparse(), mode), 4, size)
        assert (resized.shape, resized._nnz()) == ((size, 3), count)
    rows = resize_batch(fake_copy(real.to_sparse(1), mode), 4, 6, lengths=(3, 5))
    assert (rows.shape, rows._values().shape) == ((6, 5), (6, 5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR tensor support)")
def test_tensors_that_no_fake_can_stand_for_are_named_with_the_way_out(mode):
    with pytest.raises(
        ValueError,
        match=r"shape \(3, 3\) and layout torch.sparse_csr cannot become a fake tensor\. .* "
        r"Convert it first",
    ):
        fake_copy({"adjacency": torch.eye(3).to_sparse_csr()}, mode)
    with pytest.raises(
        ValueError,
        match=r"UninitializedParameter of a lazy module has no shape yet.* Run the model once",
    ):
        fake_copy(nn.LazyLinear(3), mode)
    with pytest.raises(ValueError, match=r"shape unknown .* cannot become a fake tensor"):
        fake_copy(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), mode)


def test_random_number_generators_are_as_before():
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)
    expected = draws()
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)

    def fails():
        draws()
        torch.manual_seed(7)
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"), untouched_globals():
        fails()
    assert draws() == expected
