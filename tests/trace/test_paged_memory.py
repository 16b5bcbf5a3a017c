"""Optimizer state in unified memory, as bitsandbytes' paged optimizers have it."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import memcallback as mc

WIDTH = 512
CARD = "NVIDIA L4"


@pytest.fixture
def functional(monkeypatch):
    """In place of bitsandbytes on a machine without CUDA: nothing in it can be called."""

    def fails(*args, **kwargs):
        raise RuntimeError("not available in the CPU-only version of bitsandbytes")

    module = ModuleType("bitsandbytes.functional")
    for name in ("get_paged", "fill", "prefetch_tensor"):
        setattr(module, name, fails)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", module)
    return module


class Paged(torch.optim.Optimizer):
    """Takes its state and prefetches it as bitsandbytes does (optim/optimizer.py, 0.50)."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        functional = sys.modules["bitsandbytes.functional"]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                device = parameter.device
                buffer = functional.get_paged(*parameter.shape, dtype=torch.float32, device=device)
                functional.fill(buffer, 0)
                state["state1"] = buffer
            assert state["state1"].is_paged
            functional.prefetch_tensor(state["state1"])
            parameter.add_(parameter.grad, alpha=-0.1)


def test_it_is_outside_of_the_allocator_and_a_caveat_says_so(functional):
    def predicted(optimizer):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        step = mc.TrainingStep(
            model,
            torch.zeros(8, WIDTH),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=optimizer,
        )
        return mc.predict(step, device=CARD)

    paged = predicted(Paged)
    assert paged.step.windows[-1].end.by_category[mc.Category.OPTIMIZER_STATE] == 0
    without_state = predicted(lambda parameters: torch.optim.SGD(parameters, foreach=False))
    assert paged.peak_allocated_bytes == without_state.peak_allocated_bytes
    said = "Paged optimizer state is not counted"
    assert [said in " ".join(one.caveats) for one in (paged, without_state)] == [True, False]
    # It is as it was.
    with pytest.raises(RuntimeError, match="CPU-only"):
        functional.get_paged(3)
