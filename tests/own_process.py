"""Processes of a test's own, forked from one that has imported what they need and done no more:
imports take longer than most of what they are for. Used by tests on CUDA devices, and by those that
need a process in which nothing was compiled yet.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

import pytest
import torch
from virtual_device import is_virtual, predict_as_virtual

#: What is imported on first use too; what is not installed is left out.
_IMPORTED = [
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "memcallback.integrations.lightning.callback",
    "memcallback.savings.what_if",
    "memcallback.trace.patches.inductor",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
]
_WHILE_IMPORTING = {
    # Inductor asks for a device as it is imported. After CUDA's answer no fork could use one.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Else Inductor starts processes that compile, and each imports PyTorch anew.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def start(function, args=(), nprocs=1):
    """As `torch.multiprocessing.spawn`: call a function with its rank and arguments in each."""
    _import_once()
    torch.multiprocessing.start_processes(
        _of_rank, (function, dict(os.environ), args), nprocs, start_method="forkserver"
    )


def result_of(function, *args):
    """What a function returns in a process of its own."""
    _import_once()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_with_environment, function, dict(os.environ), args).result()


def _import_once():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _WHILE_IMPORTING.items():
            patch.setenv(name, value)
        forkserver.set_forkserver_preload(_IMPORTED)
        forkserver.ensure_running()


def _of_rank(rank, function, environment, args):
    _with_environment(function, environment, (rank, *args))


def _with_environment(function, environment, args):
    """Call a function with the environment variables of the test."""
    os.environ.clear()
    os.environ.update(environment)
    if is_virtual():
        predict_as_virtual()
    return function(*args)
