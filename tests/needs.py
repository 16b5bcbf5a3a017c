"""What tests need of PyTorch that an older one does not have."""

import inspect
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memcallback.diagnose.tensors.saved import READS_SAVED

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
needs_saved = pytest.mark.skipif(
    not READS_SAVED, reason="PyTorch before 2.11 tells nothing of saved tensors"
)
needs_ranks = pytest.mark.skipif(
    _VERSION < (2, 11), reason="ranks of a job are predicted with PyTorch 2.11 or later"
)
needs_compilation = pytest.mark.skipif(
    _VERSION < (2, 11) or not hasattr(os, "fork"),
    reason="compiled code is predicted with PyTorch 2.11 or later, in a forked process",
)
needs_global_hooks = pytest.mark.skipif(
    _VERSION < (2, 11), reason="PyTorch 2.6 compiles modules without asking for global hooks"
)
needs_compiled_trainers = pytest.mark.skipif(
    _VERSION < (2, 11),
    reason="PyTorch 2.6 fails to compile Lightning and transformers 5.20, without memcallback, too",
)
needs_recorded_version = pytest.mark.skipif(_VERSION < (2, 11), reason="recorded with PyTorch 2.11")
needs_fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="this PyTorch's FSDP2 does not run on a CPU",
)
needs_modes_of_higher_order = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this PyTorch has no torch.cond under a dispatch mode",
)
needs_fused_adagrad = pytest.mark.skipif(
    "cuda_unsupported" in inspect.getsource(torch.optim.Adagrad),
    reason="this PyTorch has no Adagrad(fused=True) on CUDA",
)
