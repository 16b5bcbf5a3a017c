"""Recognize out-of-memory errors; release what they hold."""

from __future__ import annotations

import contextlib
import errno
import gc
import re
import traceback
from collections.abc import Iterator

import torch

#: What an error says that means nothing else. `out of memory` is in the messages of the caching
#: allocators of CUDA, HIP, XPU and MPS, of those devices' runtimes and drivers, and of NCCL; `out
#: of shared memory` (worker processes) and `out of resource` (Triton) are not the device's memory.
#: The statuses are those of cuBLAS, cuSPARSE, cuSOLVER, cuFFT and cuDNN (8 and 9), oneAPI and XLA.
_SAYS_SO = re.compile(
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
#: What an error also says where memory is short, and elsewhere: cuDNN has no plan whose workspace
#: can be had, or none at all; cuBLAS cannot make its handle.
_MAY_SAY_SO = re.compile(
    r"\bCUDNN_STATUS_NOT_SUPPORTED\b|\bCUBLAS_STATUS_NOT_INITIALIZED\b|Unable to find a valid cuDNN algorithm"
)


def is_out_of_memory(error: BaseException, *, is_memory_short: bool = False) -> bool:
    """Whether an error, or one that led to it, says that a device's or the machine's memory ran
    out.
    """
    return any(_says_so(one, is_memory_short) for one in _chain(error))


def out_of_memory_in(
    error: BaseException, *, is_memory_short: bool = False
) -> BaseException | None:
    """The error that says that memory ran out, of an error and those that it was raised from; None
    if none does.

    What was only being handled when another error came is that one's affair.
    """
    pending = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if _says_so(one, is_memory_short):
            return one
        pending += getattr(one, "exceptions", ())
        pending += () if one.__cause__ is None else (one.__cause__,)
    return None


def _says_so(error: BaseException, is_memory_short: bool) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # Compilers and data loaders wrap errors in kinds of their own, whose text has that of the
    # error.
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_SAYS_SO.search(text) or (is_memory_short and _MAY_SAY_SO.search(text)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, those that led to it, and those in a group, each once."""
    pending, seen = [error], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending += getattr(one, "exceptions", ())
        if one.__cause__ is not None:
            pending.append(one.__cause__)
        elif one.__context__ is not None and not one.__suppress_context__:
            pending.append(one.__context__)


def let_go(error: BaseException) -> None:
    """Empty the frames that an error has gone through, which hold the activations of the step that
    failed; its text stays.
    """
    for one in list(_chain(error)):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def release_memory(device: torch.device) -> None:
    """Collect what only cycles keep alive, and give the allocator's cache back to the device."""
    gc.collect()
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    with contextlib.suppress(
        RuntimeError
    ):  # a device in trouble can fail here too, and the caller has a better error
        module.empty_cache()
