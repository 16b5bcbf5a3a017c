"""What hooks of the optimizer reach is on the device with the model."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memcallback as mc

BATCH = torch.zeros(16, 64)


def network():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))


def loss(model, batch):
    return model(batch).square().mean()


class Averaging:
    """An object whose method is the hook."""

    def __init__(self, model):
        self.model, self.average = model, AveragedModel(model)

    def update(self, *_):
        self.average.update_parameters(self.model)


def hook_of_a_closure(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return average, lambda *_: average.update_parameters(model)


def hook_of_an_object(model):
    averaging = Averaging(model)
    return averaging.average, averaging.update


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("hook_of", [hook_of_a_closure, hook_of_an_object])
def test_an_average_of_the_weights_in_a_hook_is_predicted(hook_of, register):
    model = network()
    average, hook = hook_of(model)
    plain, hooked = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    getattr(hooked, register)(hook)
    said = mc.TrainingStep(model, BATCH, loss=loss, optimizer=plain, also=[average])
    found = mc.TrainingStep(model, BATCH, loss=loss, optimizer=hooked)
    before = [*map(torch.clone, average.state_dict().values())]
    predictions = [mc.predict(step, device="24GiB", isolate=False) for step in (said, found)]
    assert predictions[0].peak_allocated_bytes == predictions[1].peak_allocated_bytes
    assert predictions[0].phases == predictions[1].phases
    assert average.n_averaged == 0
    assert all(map(torch.equal, average.state_dict().values(), before))


def test_it_is_there_in_an_evaluation_after_the_training():
    model = network()
    average, hook = hook_of_a_closure(model)
    plain, hooked = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    hooked.register_step_post_hook(hook)
    said, found = (
        mc.predict(
            mc.InferenceStep(
                model,
                BATCH,
                after=mc.TrainingStep(model, BATCH, loss=loss, optimizer=optimizer, also=also),
            ),
            device="24GiB",
        )
        for optimizer, also in ((plain, [average]), (hooked, None))
    )
    assert found.peak_allocated_bytes == said.peak_allocated_bytes


def test_a_hook_that_reaches_the_model_alone_adds_nothing():
    model = network()
    plain, hooked = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    hooked.register_step_post_hook(lambda *_: model[0].weight.data.clamp_(-1, 1))
    with_hook, without = (
        mc.predict(mc.TrainingStep(model, BATCH, loss=loss, optimizer=one), device="24GiB")
        for one in (hooked, plain)
    )
    assert with_hook.peak_allocated_bytes == without.peak_allocated_bytes
