"""A compiled training is compiled as before, and leaves the same bits, with the callback in it."""

import multiprocessing
import os
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from needs import needs_compiled_trainers
from observer import differences, run
from torch import nn

from memcallback import MemoryCallback

#: Imports once for all trainings; each has a process of its own.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "lightning.pytorch", "torch.utils.tensorboard", "matplotlib.pyplot"]
)


def compile_network(module, **options):
    """Compile what a module trains; its training step also has work that is not compiled."""
    module.network = torch.compile(module.network, **options)


class Layer(nn.Module):
    """A layer of the user's own: of PyTorch's, `Module.compile()` compiles nothing."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh()


def compile_layers(module, **options):
    """Compile each layer in place, as regional compilation does."""
    module.network = nn.Sequential(*map(Layer, module.network))
    for layer in module.network:
        layer.compile(**options)


def compile_optimizer_step(module, **options):
    """Compile the optimizer's update."""
    configure = module.configure_optimizers

    def configured():
        optimizer = configure()
        optimizer.step = torch.compile(optimizer.step, **options)
        return optimizer

    module.configure_optimizers = configured


def trained(tmp_path, accelerator, prepare, with_callback):
    """What a training leaves, what was counted as it was compiled, and the number of steps."""
    # PyTorch's compiler gives some, without us too.
    warnings.simplefilter("ignore")
    # On a CPU what Inductor writes is compiled once for both trainings, and each has it written.
    # With CUDA it also measures, and would find in the cache what it measured.
    is_shared = accelerator == "cpu"
    cache = tmp_path / ("cache" if is_shared else f"cache-{with_callback}")
    for graphs in ("fxgraph", "aotautograd"):
        shutil.rmtree(cache / graphs, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._dynamo.utils import counters
    from torch._inductor import config

    if is_shared:
        config.compile_threads = 1  # others are processes, which import PyTorch first

    callback = MemoryCallback(per_module=True) if with_callback else None
    left = run(
        tmp_path,
        with_callback=with_callback,
        accelerator=accelerator,
        callback=callback,
        prepare=prepare,
    )
    counts = {
        # Not what the workers found in each other's cache, which depends on their speed.
        name: {key: count for key, count in of_name.items() if not key.startswith("async_compile")}
        for name, of_name in counters.items()
    }
    return left, counts, len(callback.recorder.steps) if callback else 0


def trained_twice(tmp_path, accelerator, prepare):
    """The same without and with the callback, each in a process of its own."""
    results = []
    for with_callback in (False, True):
        with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
            future = pool.submit(trained, tmp_path, accelerator, prepare, with_callback)
            results.append(future.result())
    return results


@pytest.mark.parametrize(
    ("accelerator", "prepare"),
    [
        ("cpu", compile_network),
        pytest.param("cpu", partial(compile_layers, backend="aot_eager"), id="cpu-compile_layers"),
        pytest.param("gpu", compile_network, marks=pytest.mark.cuda),
        pytest.param("gpu", compile_layers, marks=pytest.mark.cuda),
        pytest.param(
            "gpu", partial(compile_network, mode="reduce-overhead"), marks=pytest.mark.cuda
        ),
    ],
)
def test_it_is_compiled_as_often_and_leaves_the_same_bits(tmp_path, accelerator, prepare):
    results = trained_twice(tmp_path, accelerator, prepare)
    (without, counts_without, _), (with_it, counts, num_steps) = results
    assert differences(with_it, without) == []
    assert counts == counts_without
    assert counts["stats"]["unique_graphs"] > 0
    assert num_steps


@needs_compiled_trainers
def test_lightning_s_own_code_is_compiled_with_an_update_and_the_training_goes_on(tmp_path):
    # The training step runs in the update, so PyTorch compiles Lightning and its callbacks with it.
    # It compiled our callbacks for compilations, too, and waited for its own lock.
    (without, _, _), (with_it, counts, num_steps) = trained_twice(
        tmp_path, "cpu", partial(compile_optimizer_step, backend="aot_eager")
    )
    assert differences(with_it, without) == []
    assert counts["stats"]["unique_graphs"] > 0
    assert num_steps
