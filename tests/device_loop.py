"""A plain loop on a device, recorded; what a prediction of the same step is compared with."""

import gc

import torch
from torch.utils import _pytree as pytree

import memcallback as mc


def empty_device():
    """As in a new process: workspaces of cuBLAS that stay would split segments elsewhere."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def record_on_device(model, batch, loss_of, optimizer, num_steps=3, autocast_dtype=None):
    """Train a model, which moves to the device, with one batch; return the recorded steps.

    `optimizer` makes one from parameters; it gets those that are trained.
    """
    optimizer = optimizer([p for p in model.cuda().parameters() if p.requires_grad])
    recorder = mc.MemoryRecorder(model, optimizer)
    for _ in range(num_steps):
        on_device = pytree.tree_map(torch.Tensor.cuda, batch)
        with recorder.step(on_device):
            optimizer.zero_grad()
            with (
                recorder.phase(mc.Phase.FORWARD),
                torch.autocast("cuda", autocast_dtype, enabled=autocast_dtype is not None),
            ):
                loss = loss_of(model, on_device)
            with recorder.phase(mc.Phase.BACKWARD):
                loss.backward()
            with recorder.phase(mc.Phase.OPTIMIZER_STEP):
                optimizer.step()
        del on_device, loss
        torch.cuda.synchronize()
    recorder.close()
    return recorder.steps


def figures(step):
    """What each window of a step starts with, reaches and ends with, in bytes."""
    return [
        (
            window.label,
            window.start.allocated_bytes,
            window.peak_allocated_bytes,
            window.end.allocated_bytes,
            window.peak_reserved_bytes,
        )
        for window in step.windows
    ]
