"""A model that is not on the device yet: what `nn.Module.to` allocates there."""

import pytest
import torch
from needs import needs_ranks
from torch import nn

import memcallback as mc

#: Bytes on the device after `.to`, as PyTorch 2.11 took on a virtual device.
PARAMETER_BYTES = {"rows": 8192, "columns": 4096, "one": 3600, "other": 3600, "tied": 10000}
BUFFER_BYTES = {
    "rows": 16384,
    "next_rows": 16384,
    "transposed": 1048576,
    "columns": 4096,
    "expanded": 1048576,
    "mask": 3 * 40000,
}


class Block(nn.Module):
    def __init__(self, weight, mask):
        super().__init__()
        self.weight = weight
        self.register_buffer("mask", mask)

    def forward(self, x):
        return (x @ self.weight).sum() + self.mask.sum()


class Views(nn.Module):
    """Parameters and buffers that are parts of larger tensors, or the same tensor."""

    def __init__(self, device):
        super().__init__()
        with torch.device(device):
            many = torch.zeros(1024, 1024)
            self.register_buffer("rows", many[:4])
            self.register_buffer("next_rows", many[4:8])
            self.register_buffer("transposed", torch.zeros(256, 1024).t())
            self.register_buffer("columns", torch.zeros(256, 1024)[:, :4])
            self.register_buffer("expanded", torch.zeros(256, 1).expand(256, 1024))
            self.parameter_rows = nn.Parameter(torch.zeros(512, 1024)[:2])
            self.parameter_columns = nn.Parameter(torch.zeros(512, 1024)[:, :2])
            base = torch.zeros(30, 30)
            self.one, self.other = nn.Parameter(base), nn.Parameter(base)
            tied, mask = nn.Parameter(torch.zeros(50, 50)), torch.zeros(100, 100)
            self.blocks = nn.ModuleList(Block(tied, mask) for _ in range(3))

    def forward(self, x):
        held = sum(tensor.sum() for tensor in (*self.buffers(), *self.parameters()))
        return held + sum(block(x) for block in self.blocks)


def predicted(model, device="A100", **options):
    step = mc.TrainingStep(model, torch.zeros(2, 50), optimizer=torch.optim.SGD, **options)
    return mc.predict(step, device=device, progress=lambda done, num_all: None)


def at_start(model, device="A100", **options):
    return predicted(model, device, **options).step.phases[mc.Phase.FORWARD].start.by_category


class Weighted(nn.Module):
    """A module with what is given to it, which its output depends on."""

    def __init__(self, **tensors):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x):
        return x.sum() * self.weight.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_tensor_of_a_model_gets_a_storage_of_its_own_as_it_moves(device):
    held = at_start(Views(device))
    assert held[mc.Category.PARAMETER] == sum(PARAMETER_BYTES.values())
    assert held[mc.Category.BUFFER] == sum(BUFFER_BYTES.values())


def test_a_model_that_does_not_move_keeps_its_storages():
    held = at_start(Views("cpu"), "cpu")
    assert held[mc.Category.PARAMETER] == 2 * 512 * 1024 * 4 + 3600 + 10000
    assert held[mc.Category.BUFFER] == 4 * (1024 * 1024 + 2 * 256 * 1024 + 256 + 100 * 100)


class All(nn.ModuleList):
    """The sum of what its modules return."""

    def forward(self, x):
        return sum(module(x) for module in self)


class Replacing(Weighted):
    def forward(self, x):
        self.rows = torch.zeros(8, device=x.device)
        return super().forward(x)


def test_rows_that_a_step_replaces_are_freed():
    prediction = predicted(Replacing(rows=torch.zeros(1024, 1024)[:64]))
    assert mc.Category.BUFFER not in prediction.by_category  # those at the peak


class Frozen(Weighted):
    """A module that refuses to be changed after it was made."""

    is_done = False

    def __init__(self, **tensors):
        super().__init__(**tensors)
        self.is_done = True

    def __setattr__(self, name, value):
        if self.is_done:
            raise AttributeError("frozen")
        super().__setattr__(name, value)


@pytest.mark.parametrize("kind", [Weighted, Frozen])
def test_a_buffer_in_several_places_becomes_several(kind):
    shared = torch.zeros(1000)
    model = All([kind(shared=shared), kind(shared=shared, again=shared)])
    assert at_start(model)[mc.Category.BUFFER] == 3 * 4000


def test_a_buffer_in_a_module_that_is_in_several_places_stays_one():
    part = Weighted(mask=torch.zeros(1000))
    model = All([All([part]), All([part])])
    assert at_start(model, also={"teacher": All([part])})[mc.Category.BUFFER] == 4000


def test_a_sparse_buffer_in_several_places_becomes_several():
    adjacency = torch.eye(4).to_sparse_coo()
    model = All([Weighted(adjacency=adjacency), Weighted(adjacency=adjacency)])
    assert at_start(model)[mc.Category.BUFFER] == 2 * (2 * 4 * 8 + 4 * 4)


def test_a_sparse_buffer_takes_what_it_has_of_a_larger_one():
    places = torch.zeros(2, 1000, dtype=torch.long)
    twice = torch.sparse_coo_tensor(places, torch.ones(1000), check_invariants=True)
    assert at_start(Weighted(adjacency=twice.coalesce()))[mc.Category.BUFFER] == 2 * 8 + 4


class Jagged(Weighted):
    def forward(self, x):
        return self.rows * super().forward(x)


def test_a_jagged_buffer_in_several_places_keeps_the_same_lengths():
    rows = [torch.zeros(5, 8), torch.zeros(70, 8)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    model = All([Jagged(rows=jagged), Jagged(rows=jagged)])
    held = at_start(model, loss=lambda model, x: model(x).values().sum())
    assert held[mc.Category.BUFFER] == 2 * (75 * 8 * 4 + 3 * 8)


class Queue(Weighted):
    def forward(self, x):
        self.queue = torch.cat([x, self.queue[: -len(x)]])
        return super().forward(x)


def test_a_model_beside_lets_go_of_what_it_replaces():
    def peak_bytes(**options):
        return predicted(Weighted(), loss=loss, **options).peak_allocated_bytes

    teacher = Queue(queue=torch.zeros(10_000, 50))

    def loss(model, x):
        return model(x) + teacher(x)

    assert peak_bytes(also={"teacher": teacher}) == peak_bytes()


@needs_ranks
def test_ranks_predict_a_teacher_that_has_a_module_of_the_model():
    buffer = torch.zeros(1000)
    model = All([Weighted(one=buffer, again=buffer), Weighted()])
    teacher = All([model[0], Weighted()])
    held = at_start(model, also={"teacher": teacher}, ranks=mc.Ranks(2, "fsdp2"))
    assert held[mc.Category.BUFFER] == 4000  # in a job of ranks it stays one


@pytest.mark.parametrize("is_first", [True, False])
def test_a_parameter_that_is_a_buffer_elsewhere_stays_one_if_it_moves_first(is_first):
    parameter = nn.Parameter(torch.zeros(1000))
    owner, other = Weighted(kept=parameter), Weighted()
    other.register_buffer("kept", parameter)
    held = at_start(All([owner, other] if is_first else [other, owner]))
    total_bytes = held[mc.Category.PARAMETER] + held[mc.Category.BUFFER]
    assert total_bytes == 2 * 40 + 4000 * (1 if is_first else 2)


def test_a_model_beside_has_buffers_of_its_own():
    shared = torch.zeros(1000)
    model, teacher = Weighted(shared=shared), Weighted(shared=shared)
    assert at_start(model, also={"teacher": teacher})[mc.Category.BUFFER] == 2 * 4000


class Counting(Weighted):
    """Sets the count of a module before it, and allocates as many numbers as its own says."""

    def forward(self, x, before=None):
        if before is not None:
            before.count.fill_(1000)
        return torch.zeros(1000 * int(self.count), device=x.device).sum() * super().forward(x)


def test_a_buffer_that_changes_leaves_its_twin_in_another_module_as_it_is():
    def peak_bytes(first, second):
        model = All([Counting(count=first), Counting(count=second)])

        def loss(model, x):
            return model[1](x, before=model[0])

        return predicted(model, loss=loss).peak_allocated_bytes

    count = torch.tensor(5)
    assert peak_bytes(count, count) == peak_bytes(count, count.clone())


@pytest.mark.cuda
def test_a_model_on_the_device_keeps_its_storages():
    model = Views("cuda")
    held = at_start(model, torch.cuda.get_device_name())
    assert held[mc.Category.PARAMETER] == 2 * 512 * 1024 * 4 + 3600 + 10000
    assert held[mc.Category.BUFFER] == 4 * (1024 * 1024 + 2 * 256 * 1024 + 256 + 100 * 100)


@pytest.mark.cuda
def test_a_model_takes_on_a_device_what_is_predicted_of_it():
    torch.zeros(1, device="cuda")
    model, held = Views("cpu"), at_start(Views("cpu"), torch.cuda.get_device_name())
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model.to("cuda")
    moved_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert moved_bytes == held[mc.Category.PARAMETER] + held[mc.Category.BUFFER]
