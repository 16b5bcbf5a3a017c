"""Recognizes out-of-memory errors, and releases the memory they keep alive."""

from __future__ import annotations

import contextlib
import errno
import gc
import re
import traceback
from collections.abc import Iterator

import torch

#: Messages that identify an out-of-memory error, and nothing else. `out of memory` is in those of
#: the caching allocators of CUDA, HIP, XPU and MPS, of those devices' runtimes and drivers, and of
#: NCCL. `out of shared memory` (worker processes) and `out of resource` (Triton) are not device
#: memory. The statuses are those of cuBLAS, cuSPARSE, cuSOLVER, cuFFT and cuDNN (8 and 9), oneAPI
#: and XLA.
_OUT_OF_MEMORY = re.compile(
    r"\bout of memory\b"
    r"|\bC(UBLAS|USPARSE|USOLVER|UDNN)_STATUS_ALLOC_FAILED\b"
    r"|\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED\b"
    r"|\bCUFFT_ALLOC_FAILED\b"
    r"|\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b"
    r"|OUT_OF_(DEVICE|HOST)_MEMORY\b"
    r"|\bRESOURCE_EXHAUSTED\b"
    r"|DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|\bCannot allocate memory\b"
    r"|\bFailed to CUDA (host )?[cm]alloc\b"
)
#: Messages of errors that can also have other causes: cuDNN finds no plan whose workspace fits, or
#: no plan at all; cuBLAS cannot create its handle.
_MAYBE_OUT_OF_MEMORY = re.compile(
    r"\bCUDNN_STATUS_NOT_SUPPORTED\b"
    r"|\bCUBLAS_STATUS_NOT_INITIALIZED\b"
    r"|Unable to find a valid cuDNN algorithm"
)


def is_out_of_memory(error: BaseException, *, is_memory_short: bool = False) -> bool:
    """Whether an error, or one that led to it, means that device or host memory ran out."""
    return any(_is_out_of_memory(cause, is_memory_short) for cause in _chain(error))


def out_of_memory_in(
    error: BaseException, *, is_memory_short: bool = False
) -> BaseException | None:
    """Find the out-of-memory error among an error and those it was raised from; else None."""
    # An out-of-memory error that was being handled when another one occurred does not count.
    chain = _chain(error, with_contexts=False)
    return next((cause for cause in chain if _is_out_of_memory(cause, is_memory_short)), None)


def _is_out_of_memory(error: BaseException, is_memory_short: bool) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Compilers and data loaders wrap errors in their own RuntimeErrors, which quote the message.
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(
        _OUT_OF_MEMORY.search(text) or (is_memory_short and _MAYBE_OUT_OF_MEMORY.search(text))
    )


def _chain(error: BaseException, *, with_contexts: bool = True) -> Iterator[BaseException]:
    """The error, its causes (or else the errors being handled), and those in a group, each once."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += getattr(current, "exceptions", ())
        if current.__cause__ is not None:
            pending.append(current.__cause__)
        elif with_contexts and current.__context__ is not None and not current.__suppress_context__:
            pending.append(current.__context__)


def let_go(error: BaseException) -> None:
    """Clear the frames of an error, which keep the activations of the failed step alive."""
    for cause in list(_chain(error)):
        traceback.clear_frames(cause.__traceback__)
        cause.__traceback__ = None


def release_memory(device: torch.device) -> None:
    """Collect garbage in cycles, and empty the allocator's cache."""
    gc.collect()
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    # A broken device can fail here too, but the caller has the better error.
    with contextlib.suppress(RuntimeError):
        module.empty_cache()
