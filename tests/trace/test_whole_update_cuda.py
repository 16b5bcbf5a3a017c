"""A whole update that is compiled, and one in a single thread, predicted and run on a device."""

import json
import os
from functools import partial

import own_process
import pytest
import torch
import torch._dynamo
from torch import nn

import memcallback as mc

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="compiles in a child alone"),
]
NUM_UPDATES = 4


def loss_of(model, batch):
    return model(batch).float().square().mean()


def peaks(_, options, file):
    """In a process of its own: the peaks of each update, predicted, if for a file, and measured."""
    torch._dynamo.config.compiled_autograd = options.get("compiled_autograd", False)
    torch.autograd.set_multithreading_enabled(options.get("in_two_threads", True))
    largest_norm = options.get("clip_grad_norm")
    compile_update = {
        None: None,
        "default": torch.compile,
        "graphs": partial(torch.compile, mode="reduce-overhead"),
    }[options.get("compiled")]
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512))
    batch = torch.ones(1024, 512)
    step = mc.TrainingStep(
        model,
        batch,
        loss=loss_of,
        optimizer=torch.optim.AdamW,
        precision="bf16-mixed",
        clip_grad_norm=largest_norm,
        compile_update=compile_update,
    )
    predicted = list(mc.predict(step, device="cuda").steps) if file else []
    predicted += predicted[-1:] * (NUM_UPDATES - len(predicted))
    model.cuda()
    optimizer, measured = torch.optim.AdamW(model.parameters()), []

    def update(on_device):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, on_device)
        loss.backward()
        if largest_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()

    run = update if compile_update is None else compile_update(update)
    for _ in range(NUM_UPDATES):
        torch.cuda.reset_peak_memory_stats()
        on_device = batch.cuda()
        run(on_device)
        del on_device
        measured.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    if file is None:
        return
    ours = [[each.peak_allocated_bytes, each.peak_reserved_bytes] for each in predicted]
    with open(file, "w") as opened:
        json.dump([ours[:NUM_UPDATES], measured], opened)


@pytest.mark.parametrize(
    "options",
    [
        {"in_two_threads": False},
        {"compiled": "default"},
        {"compiled": "default", "clip_grad_norm": 1.0},
        {"compiled": "default", "compiled_autograd": True},
        {"compiled": "graphs"},
        {"compiled": "graphs", "compiled_autograd": True},
    ],
    ids=str,
)
def test_updates_are_predicted(options, monkeypatch, tmp_path):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "figures.json"
    if "compiled" in options:  # the second process finds the code of the first
        own_process.start(peaks, (options, None))
    own_process.start(peaks, (options, str(file)))
    predicted, measured = json.loads(file.read_text())
    # A process that compiles, or finds code in the cache, makes constants in its first update; the
    # first replay of graphs still has gradients that the recording left.
    assert [predicted[number] for number in (1, 3)] == [measured[number] for number in (1, 3)]
    assert [reserved for _, reserved in predicted] == [reserved for _, reserved in measured]
