"""Trainings one after the other in one process, on a device: what each is predicted to take in
segments of those before, and what it takes.

Run in a process of its own: where the driver puts a new segment depends on all that ran before, and
the addresses decide which of several equal free blocks is taken.
"""

from __future__ import annotations

import gc

import torch
from device_loop import empty_device
from torch import nn

import memcallback as mc


def trained(model, batch, optimizer=None):
    """What is predicted of a training, and its last step."""
    optimizer = torch.optim.Adam(model.parameters()) if optimizer is None else optimizer
    step = mc.TrainingStep(
        model, batch, loss=lambda model, batch: model(batch).sum(), optimizer=optimizer
    )
    recorder = mc.MemoryRecorder(model, optimizer)
    with mc.MemoryLog(recorder, step, log_dir=None, wait_for_prediction=True, verbose=0) as log:
        for _ in range(3):
            on_device = batch.cuda()
            with recorder.step(on_device):
                optimizer.zero_grad()
                with recorder.phase(mc.Phase.FORWARD):
                    loss = model(on_device).sum()
                with recorder.phase(mc.Phase.BACKWARD):
                    loss.backward()
                with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                    optimizer.step()
            del on_device, loss
        prediction = log.prediction
    return prediction, recorder.steps[-1]


def layers():
    return nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 512)).cuda()


def a_model_of_its_own(batch):
    """A training whose model is gone afterwards."""
    found = trained(layers(), batch)
    gc.collect()
    return found


def figures(prediction, step):
    """Data of a training, for another process."""
    return {
        "predicted": [prediction.peak_allocated_bytes, prediction.peak_reserved_bytes],
        "measured": [step.peak_allocated_bytes, step.peak_reserved_bytes],
        "alone": prediction.on("RTX 3090").peak_reserved_bytes,
        "num_segments": len(prediction.at_start),
        "caveats": prediction.caveats,
    }


def once_more(has_gradients, keeps_optimizer):
    """A model that is trained with large batches, and then with small ones."""
    empty_device()
    model = layers()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, torch.zeros(4096, 2048), optimizer)
    if not has_gradients:
        optimizer.zero_grad()
    if not keeps_optimizer:
        optimizer = torch.optim.Adam(model.parameters())
    gc.collect()
    return figures(*trained(model, torch.zeros(512, 2048), optimizer))


def shared_batch():
    """A training all of whose steps have the same batch, which is on the device."""
    empty_device()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    return figures(*trained(model, torch.zeros(1024, 1024).cuda()))


def run():
    """All of it: what the tests compare."""
    empty_device()
    found = {"first": figures(*a_model_of_its_own(torch.zeros(4096, 2048)))}
    found["second"] = figures(*a_model_of_its_own(torch.zeros(512, 2048)))
    for has_gradients in (False, True):
        for keeps_optimizer in (False, True):
            found[has_gradients, keeps_optimizer] = once_more(has_gradients, keeps_optimizer)
    found["shared batch"] = shared_batch()
    return found
