"""The workspaces that PyTorch gives to cuBLAS and cuBLASLt, and on AMD to hipBLAS and hipBLASLt."""

from __future__ import annotations

from typing import Literal

from memcallback.core.units import MiB

#: Whether each call of cuBLASLt takes its workspace and gives it back, each handle keeps one, or it
#: has the one that cuBLAS keeps.
LtWorkspace = Literal["each call", "each handle", "shared"]
#: The workspace of cuBLASLt where it is not cuBLAS's, measured on the CUDA build of PyTorch 2.11
#: for compute capability 7.5, 8.0 and 9.0.
CUBLASLT_WORKSPACE_BYTES = 1 * MiB
#: Architectures of AMD whose hipBLAS has the larger workspace, and those that prefer hipBLASLt.
_LARGE_OF_AMD = ("gfx94", "gfx95")
_PREFERS_HIPBLASLT = ("gfx90a", "gfx94", "gfx95")


def cublas_workspace_bytes(capability: tuple[int, int], torch_version: tuple[int, int]) -> int:
    """The workspace that each cuBLAS handle keeps on a device of a compute capability.

    Source: `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp, read from the machine code
    of libtorch_cuda.so of PyTorch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 (pull requests 175344 and
    189312). CUBLAS_WORKSPACE_CONFIG would change it; it is not followed.
    """
    if torch_version < (2, 12):
        is_large = capability == (9, 0)
    else:
        is_large = capability[0] in ((9, 10, 12) if torch_version < (2, 14) else (9, 10, 11, 12))
    return 32 * MiB if is_large else 8_519_680


def cublaslt_workspace(torch_version: tuple[int, int]) -> LtWorkspace:
    """Who has the workspace of cuBLASLt, which multiplies and adds a bias.

    The shared one is that of `cublas_workspace_bytes`, one for each thread and stream: cuBLASLt
    takes no more, whatever CUBLASLT_WORKSPACE_SIZE says.

    Source: ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp (pull requests 156495, 168175 and
    175879). `cublaslt_handle_stream_to_workspace` is in libtorch_cuda.so of PyTorch 2.9.1 and
    2.10.0, and not in 2.6.0 and 2.8.0; 2.11.0 and later ones ran on virtual devices
    (tests/recorded/workspaces.json). TORCH_CUBLASLT_UNIFIED_WORKSPACE would change it; it is not
    followed. Nor is 2.15.0, where each call of either library gives back what it took (pull request
    194311; seen on virtual devices, no recording is kept). TORCH_CUBLAS_WORKSPACE_CACHE=1 keeps it.
    """
    if torch_version < (2, 9):
        return "each call"
    return "each handle" if torch_version < (2, 12) else "shared"


def hipblas_workspace_bytes(architecture: str, torch_version: tuple[int, int]) -> int:
    """The workspace of each hipBLAS handle on an architecture of AMD, such as `gfx942`.

    Source: `parseChosenWorkspaceSize` in a ROCm build, from PyTorch 2.6 on (pull request 138791);
    before it hipBLAS has its own memory. None was measured. HIPBLAS_WORKSPACE_CONFIG would change
    it; it is not followed.
    """
    if torch_version < (2, 6):
        return 0
    return (128 if architecture.startswith(_LARGE_OF_AMD) else 32) * MiB


def hipblaslt_workspace_bytes(torch_version: tuple[int, int]) -> int:
    """The workspace of hipBLASLt; not counted before PyTorch 2.6.

    Source: `parseCUDABlasLtWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp in a ROCm build (pull
    request 139300). AMD's own builds of PyTorch 2.13 and 2.14 take 80 MiB (ROCm/pytorch pull
    requests 3657 and 3656). None was measured. HIPBLASLT_WORKSPACE_SIZE would change it; it is not
    followed.
    """
    return 0 if torch_version < (2, 6) else 76 * MiB


def prefers_hipblaslt(architecture: str) -> bool:
    """Whether hipBLASLt, not hipBLAS, computes products in float32, float16 and bfloat16.

    Source: `Context::blasPreferredBackend` and `getHipblasltPreferredArchs` in ATen/Context.cpp.
    """
    return architecture.startswith(_PREFERS_HIPBLASLT)
