"""Which errors say that memory ran out, and that they let go of what they hold."""

import errno
import gc
import weakref

import pytest
import torch

from memcallback.diagnose.out_of_memory.errors import is_out_of_memory, let_go

#: The words of the libraries, as their users report them.
OUT_OF_MEMORY = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB"
    ),
    torch.cuda.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    RuntimeError(
        "CUDA out of memory. Tried to allocate 12.50 GiB (GPU 0; 10.92 GiB total capacity)"
    ),
    RuntimeError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call"
    ),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError(
        "HIP out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 63.98 GiB"
    ),
    RuntimeError(
        "XPU out of memory, please use `empty_cache` to release all unoccupied cached memory."
    ),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 6.04 GB, other allocations: 1.04 GB, max "
        "allowed: 6.77 GB)"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes."
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 4096 bytes."
    ),
    RuntimeError(
        "NCCL error: unhandled cuda error, Last error: Failed to CUDA calloc 6291456 bytes"
    ),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:40])
def test_what_libraries_say_when_memory_runs_out_is_recognised(error):
    assert is_out_of_memory(error)


def test_an_allocation_that_no_machine_can_make_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x10)"),
        RuntimeError(
            "DataLoader worker (pid 17) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory."
        ),
        RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
            "non-contiguous input."
        ),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input.",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ],
)
def test_an_error_with_several_causes_counts_only_while_memory_is_short(text):
    assert not is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError(text), is_memory_short=True)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"), is_memory_short=True)


def raised(error, *, cause=None, context=None, is_suppressed=False):
    """An error with a chain, as `raise ... from ...` and `except` leave it."""
    error.__cause__, error.__context__ = cause, context
    error.__suppress_context__ = is_suppressed or cause is not None
    return error


def test_the_chain_of_an_error_is_followed():
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(raised(ValueError("step failed"), cause=oom))
    assert is_out_of_memory(
        raised(ValueError("step failed"), context=raised(KeyError("x"), context=oom))
    )
    assert not is_out_of_memory(
        raised(ValueError("mended, then another"), context=oom, is_suppressed=True)
    )


def test_a_chain_that_bites_its_tail_ends():
    first, second = ValueError("a"), ValueError("b")
    raised(first, context=second)
    raised(second, context=first)
    assert not is_out_of_memory(first)


def test_an_error_that_is_let_go_frees_what_its_frames_held():
    class Activation:
        pass

    alive = []

    def step():
        activation = Activation()
        alive.append(weakref.ref(activation))
        cycle = [activation]
        cycle.append(cycle)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def outer():
        try:
            step()
        except RuntimeError as error:
            raise ValueError("step failed") from error

    kept = None
    try:
        outer()
    except ValueError as error:
        kept = error
    assert alive[0]() is not None
    let_go(kept)
    gc.collect()
    assert alive[0]() is None
    assert str(kept) == "step failed"
    assert is_out_of_memory(kept)
