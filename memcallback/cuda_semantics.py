"""What CUDA does for a Python line where a CPU would do otherwise, for as long as a step is traced on fake tensors.

Three things make fakes of the CPU behave as tensors of a CUDA device: kernels for autocast and for composite operators that
choose by device, which the dispatcher calls; a mode for torch functions, which understands `device="cuda"`; and answers in
place of those functions of torch that ask for a device. All of it is gone when the trace is over.

What other threads see meanwhile: the answers are for the thread that traces, each other one gets PyTorch's own. Composite operators
pass its tensors through to PyTorch's own decomposition, and autocast to the lists that PyTorch has. Its results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from memcallback import cuda_autocast
from memcallback.cuda_answers import answers
from memcallback.cuda_composites import registered
from memcallback.cuda_functions import CudaFunctions
from memcallback.devices import DeviceSpec
from memcallback.trace_mode import TraceMode


@contextmanager
def cuda_semantics(mode: TraceMode, device: DeviceSpec) -> Iterator[None]:
    """Let fake tensors of a mode behave as CUDA tensors, until the end of the context.

    Only one such context may be open in a process.

    Args:
        mode: The mode; it is entered.
        device: The card.
    """
    cache = cuda_autocast.AutocastCache()
    functions = CudaFunctions(mode)
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast.registered(cache))
        stack.enter_context(registered(device))
        for target, name, value in answers(mode, device, cache, functions):
            if hasattr(target, name):
                stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mode)
        stack.enter_context(functions)
        try:
            mode.tells_cuda = True
            yield
        finally:
            mode.tells_cuda = False
            cache.clear()
