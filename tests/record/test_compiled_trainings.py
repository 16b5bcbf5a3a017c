"""A compiled training is compiled as before, and leaves the same bits, with the callback in it."""

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
from observer import differences, run

from memcallback import MemoryCallback


def compile_network(module, **options):
    """Compile what a module trains; its training step also has work that is not compiled."""
    module.network = torch.compile(module.network, **options)


def trained(tmp_path, accelerator, options, with_callback):
    """What a training leaves, what was counted as it was compiled, and the number of steps."""
    # PyTorch's compiler gives some, without us too.
    warnings.simplefilter("ignore")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / f"cache-{with_callback}")
    from torch._dynamo.utils import counters

    callback = MemoryCallback(per_module=True) if with_callback else None
    left = run(
        tmp_path,
        with_callback=with_callback,
        accelerator=accelerator,
        callback=callback,
        prepare=partial(compile_network, **options),
    )
    counts = {
        # Not what the workers found in each other's cache, which depends on their speed.
        name: {key: count for key, count in of_name.items() if not key.startswith("async_compile")}
        for name, of_name in counters.items()
    }
    return left, counts, len(callback.recorder.steps) if callback else 0


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("cpu", {}),
        pytest.param("gpu", {}, marks=pytest.mark.cuda),
        pytest.param("gpu", {"mode": "reduce-overhead"}, marks=pytest.mark.cuda),
    ],
)
def test_it_is_compiled_as_often_and_leaves_the_same_bits(tmp_path, accelerator, options):
    results = []
    for with_callback in (False, True):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            future = pool.submit(trained, tmp_path, accelerator, options, with_callback)
            results.append(future.result())
    (without, counts_without, _), (with_it, counts, num_steps) = results
    assert differences(with_it, without) == []
    assert counts == counts_without
    assert counts["stats"]["unique_graphs"] > 0
    assert num_steps
