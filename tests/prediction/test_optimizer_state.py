"""Predicted optimizer state against measured state: every optimizer of torch.optim is stepped."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook

import memcallback as mc
from memcallback.prediction.textbook.optimizer_state import optimizer_state_bytes

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"amsgrad": True, "fused": True}),
    ("Adam", {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": torch.tensor(0.01)}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("Adagrad", {}),
    ("Adagrad", {"fused": True, "lr_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "foreach": True}),
    ("Adadelta", {}),
    ("Adadelta", {"foreach": True}),
    ("Adamax", {}),
    ("Adamax", {"foreach": True}),
    ("NAdam", {}),
    ("NAdam", {"decoupled_weight_decay": True, "foreach": True}),
    ("RAdam", {}),
    ("RAdam", {"foreach": True}),
    ("ASGD", {}),
    ("ASGD", {"foreach": True}),
    ("Rprop", {}),
    ("Rprop", {"foreach": True}),
    ("Adafactor", {}),
    ("Adafactor", {"foreach": True}),
    ("SparseAdam", {}),
    ("Muon", {}),
    ("Muon", {"momentum": 0.0, "nesterov": False}),
    ("LBFGS", {"history_size": 3}),
    ("LBFGS", {"history_size": 1, "max_iter": 4}),
]
CASE_IDS = [
    f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"
    for name, options in CASES
]


def parameters_for(name: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"Muon": [(5, 7), (3, 2)], "SparseAdam": [(11, 3)]}.get(
        name, [(5, 7), (7,), (2, 3, 4, 5), ()]
    )
    frozen = (
        []
        if name in ("SparseAdam", "LBFGS")
        else [nn.Parameter(torch.zeros(123, 4), requires_grad=False)]
    )
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes] + frozen


def optimizer_for(
    name: str, options: dict[str, object], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    return getattr(torch.optim, name)(parameters, **options)


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], num_steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(((parameter - 1.25) ** 4).sum() for parameter in parameters)
        loss.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            for parameter in parameters:
                parameter.grad = parameter.grad.to_sparse()
        return loss

    for _ in range(num_steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def measured_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for state in optimizer.state.values():
        for value in state.values():
            visit(value)
    return sum(storages.values())


@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_the_bytes_foretold_are_the_bytes_after_steps(name, options):
    parameters = parameters_for(name)
    optimizer = optimizer_for(name, options, parameters)
    foretold = optimizer_state_bytes(optimizer)
    step(optimizer, parameters, num_steps=6)
    assert foretold is not None
    assert sum(foretold.values()) == measured_bytes(optimizer)
    assert foretold.keys() <= {"cpu"}


@pytest.mark.parametrize(("name", "options"), CASES, ids=CASE_IDS)
def test_after_steps_the_state_itself_gives_the_same_bytes(name, options):
    parameters = parameters_for(name)
    optimizer = optimizer_for(name, options, parameters)
    step(optimizer, parameters, num_steps=6)
    assert sum(optimizer_state_bytes(optimizer).values()) == measured_bytes(optimizer)


def test_every_optimizer_of_this_torch_is_stepped_in_these_tests():
    here = {
        name
        for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert here <= {name for name, _ in CASES}


def test_a_line_search_of_lbfgs_stays_within_the_bound():
    parameters = parameters_for("LBFGS")
    optimizer = torch.optim.LBFGS(parameters, history_size=3, line_search_fn="strong_wolfe")
    foretold = optimizer_state_bytes(optimizer)
    step(optimizer, parameters, num_steps=6)
    assert 0 <= sum(foretold.values()) - measured_bytes(optimizer) <= 4


def test_the_history_of_lbfgs_is_counted_before_it_is_full():
    parameters = parameters_for("LBFGS")
    optimizer = torch.optim.LBFGS(parameters, max_iter=1)
    foretold = optimizer_state_bytes(optimizer)
    step(optimizer, parameters, num_steps=1)
    assert optimizer_state_bytes(optimizer) == foretold
    assert sum(foretold.values()) > 50 * measured_bytes(optimizer) > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("Adam", {}), ("NAdam", {}), ("Adafactor", {}), ("ASGD", {}), ("Adagrad", {})],
)
def test_scalars_are_eight_bytes_under_a_default_dtype_of_float64(name, options):
    parameters = parameters_for(name)
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = optimizer_for(name, options, parameters)
        foretold = optimizer_state_bytes(optimizer)
        step(optimizer, parameters, num_steps=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sum(foretold.values()) == measured_bytes(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_state_has_the_itemsize_of_its_parameter(dtype):
    parameter = nn.Parameter(torch.ones(10, 3, dtype=dtype))
    optimizer = torch.optim.Adam([parameter])
    foretold = optimizer_state_bytes(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sum(foretold.values()) == measured_bytes(optimizer) == 2 * 30 * dtype.itemsize + 4


@pytest.mark.parametrize(
    ("name", "options", "device_bytes", "host_bytes"),
    [
        ("Adam", {"amsgrad": False}, 800, 4),
        ("Adam", {"amsgrad": False, "capturable": True}, 804, 0),
        ("AdamW", {"amsgrad": True, "fused": True}, 1204, 0),
        ("NAdam", {"capturable": False}, 800, 8),
        ("NAdam", {"capturable": True}, 808, 0),
        ("ASGD", {"capturable": False}, 412, 0),
        ("Adagrad", {"fused": None}, 400, 4),
        ("Adafactor", {}, 80, 4),
    ],
)
def test_scalars_lie_on_the_cpu_unless_the_optimizer_keeps_them_on_the_device(
    name, options, device_bytes, host_bytes
):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(10, 10))], **options)
    state = optimizer_state_bytes(optimizer, device_type="cuda")
    assert (state["cuda"], state.get("cpu", 0)) == (device_bytes, host_bytes)


def test_each_device_type_has_its_own_sum():
    optimizer = torch.optim.Adam([nn.Parameter(torch.empty(10, 10, device="meta"))])
    assert optimizer_state_bytes(optimizer) == {"meta": 800, "cpu": 4}


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_of_fakes_is_counted_on_the_device_that_they_stand_for(make):
    mode = FakeTensorMode()
    with mode:
        optimizer = make([nn.Parameter(torch.empty(10, 10))])
    on_device = {torch.optim.Adam: 800, torch.optim.Adagrad: 400}[make]
    assert optimizer_state_bytes(optimizer, device_type="cuda") == {"cuda": on_device, "cpu": 4}


@pytest.mark.parametrize(
    ("make", "multiple"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 2),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 3),
        (lambda parameters: torch.optim.Adam(parameters), 4),
    ],
    ids=["SGD", "SGD with momentum", "Adam"],
)
def test_weights_gradients_and_state_are_the_multiple_of_the_parameters_that_the_articles_give(
    make, multiple
):
    model = nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 10, bias=False))
    parameter_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    state_bytes = sum(optimizer_state_bytes(make(model.parameters())).values())
    step_scalars_bytes = 2 * 4 if multiple == 4 else 0
    assert 2 * parameter_bytes + state_bytes - step_scalars_bytes == multiple * parameter_bytes


def test_a_subclass_of_a_known_optimizer_has_its_state():
    class AdamWithADifferentName(torch.optim.Adam):
        pass

    assert optimizer_state_bytes(AdamWithADifferentName([nn.Parameter(torch.ones(4, 4))])) == {
        "cpu": 2 * 64 + 4
    }


class Unknown(torch.optim.Optimizer):
    reads_values = False

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.reads_values and parameter.sum().item() == 0:
                    return
                self.state[parameter]["z"] = torch.zeros(
                    parameter.numel() * 3, device=parameter.device
                )


class ReadsValues(Unknown):
    reads_values = True


def parameters_of_which_one_is_frozen():
    return [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(9), requires_grad=False)]


def test_an_optimizer_that_reads_values_is_unknown_until_it_has_state_of_its_own():
    optimizer = ReadsValues(parameters_of_which_one_is_frozen())
    assert optimizer_state_bytes(optimizer) is None
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == {"cpu": 3 * 14 * 4}
    assert optimizer_state_bytes(optimizer, device_type="cuda") == {"cuda": 3 * 14 * 4}


def test_an_optimizer_of_anybody_is_known_before_its_first_step():
    optimizer = Unknown(parameters_of_which_one_is_frozen())
    assert optimizer_state_bytes(optimizer) == {"cpu": 3 * 5 * 4}
    assert optimizer_state_bytes(optimizer, device_type="cuda") == {"cuda": 3 * 5 * 4}
    assert not optimizer.state


def test_hooks_of_all_optimizers_see_no_step():
    seen = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(5))])
        optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
        optimizer_state_bytes(optimizer)
    finally:
        hook.remove()
    assert seen == []


def test_sizing_makes_no_state():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(5))])
    optimizer_state_bytes(optimizer)
    assert not optimizer.state


def test_a_function_may_go_through_the_parameters_for_each_group():
    def in_groups(parameters):
        return torch.optim.AdamW(
            [
                {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
                {"params": [one for one in parameters if one.ndim >= 2]},
            ]
        )

    def state_bytes(optimizer):
        step = mc.TrainingStep(
            torch.nn.Linear(512, 512),
            torch.zeros(4, 512),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=optimizer,
        )
        prediction = mc.predict(step, device="NVIDIA A100-SXM4-80GB")
        return prediction.by_category[mc.Category.OPTIMIZER_STATE]

    assert state_bytes(in_groups) == state_bytes(torch.optim.AdamW) > 2 * 4 * 512 * 512


def test_a_product_may_be_added_to_a_number():
    step = mc.TrainingStep(
        torch.nn.Linear(64, 64),
        torch.zeros(4, 64),
        loss=lambda model, batch: torch.addmm(torch.zeros(()), batch, model.weight).sum(),
        optimizer=torch.optim.SGD,
    )
    assert mc.predict(step, device="NVIDIA A100-SXM4-80GB").fits
