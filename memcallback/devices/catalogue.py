"""DeviceSpec, HostSpec, the catalogue of cards, and find_device(): lookup by name or size."""

from __future__ import annotations

import difflib
import operator
import re
from dataclasses import dataclass, replace

from memcallback.core.units import GiB, MiB, format_bytes, parse_bytes
from memcallback.core.validation import described
from memcallback.devices import blas, cards


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A CUDA device.

    Attributes:
        name: The driver's name for it, such as `NVIDIA A100-SXM4-80GB`.
        capacity_bytes: All its memory.
        compute_capability: Such as (8, 0).
        num_multiprocessors: Streaming multiprocessors.
        shared_memory_per_block_bytes: Without opting in for more.
        shared_memory_per_block_optin_bytes: With opting in.
        max_threads_per_multiprocessor: Threads that can reside on one multiprocessor.
        max_blocks_per_multiprocessor: Blocks that can reside on one multiprocessor.
        l2_cache_bytes: L2 cache of the whole device.
        clock_khz: Clock of the multiprocessors.
        memory_clock_khz: Clock of the memory.
        context_bytes: The CUDA context, outside the allocator.
        communication_bytes: The communication library, outside the allocator; 0 with one rank.
        caveats: What was assumed, one sentence each.
        local_index: Its CUDA index, if it is a device of this machine; None otherwise.
        architecture_of: The card whose architecture was assumed, if only the size is known; None
            otherwise.
        torch_version: The PyTorch whose workspaces it takes, such as (2, 11); None for the one that
            is installed.
        amd_architecture: Such as `gfx942` for a card of AMD, whose other attributes are then those
            of a card of NVIDIA, but for its memory; None for a card of NVIDIA.
    """

    name: str
    capacity_bytes: int
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    shared_memory_per_block_bytes: int
    shared_memory_per_block_optin_bytes: int
    max_threads_per_multiprocessor: int
    max_blocks_per_multiprocessor: int
    l2_cache_bytes: int
    clock_khz: int
    memory_clock_khz: int
    context_bytes: int
    communication_bytes: int = 0
    caveats: tuple[str, ...] = ()
    local_index: int | None = None
    architecture_of: str | None = None
    torch_version: tuple[int, int] | None = None
    amd_architecture: str | None = None

    @property
    def architecture(self) -> str:
        """In words: `compute capability 8.0`, or `gfx942`."""
        major, minor = self.compute_capability
        return self.amd_architecture or f"compute capability {major}.{minor}"

    @property
    def cublas_workspace_bytes(self) -> int:
        """The workspace of each cuBLAS handle; on AMD of hipBLAS."""
        if self.amd_architecture is not None:
            return blas.hipblas_workspace_bytes(self.amd_architecture, self._torch_version)
        return blas.cublas_workspace_bytes(self.compute_capability, self._torch_version)

    @property
    def cublaslt_workspace(self) -> blas.LtWorkspace:
        """Who has the workspace of cuBLASLt; on AMD of hipBLASLt, which shares none."""
        owner = blas.cublaslt_workspace(self._torch_version)
        return "each handle" if self.amd_architecture and owner == "shared" else owner

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """The workspace of cuBLASLt where it shares none; on AMD of hipBLASLt."""
        if self.amd_architecture is not None:
            return blas.hipblaslt_workspace_bytes(self._torch_version)
        return blas.CUBLASLT_WORKSPACE_BYTES

    @property
    def prefers_cublaslt(self) -> bool:
        """Whether cuBLASLt computes all products in float32, float16 and bfloat16: on AMD alone."""
        return blas.prefers_hipblaslt(self.amd_architecture or "")

    @property
    def _torch_version(self) -> tuple[int, int]:
        from memcallback.core.tensors import torch_version

        return self.torch_version or torch_version()

    @property
    def allocator_capacity_bytes(self) -> int:
        """What the caching allocator can have: the capacity minus `outside_bytes`, at least 0."""
        return max(0, self.capacity_bytes - self.outside_bytes)

    @property
    def outside_bytes(self) -> int:
        """What this process uses outside the allocator: context and communication library."""
        return self.context_bytes + self.communication_bytes

    @property
    def most_outside_bytes(self) -> int:
        """The most that was seen of it, if the context is assumed; suggestions leave it free.

        On a small card an eighth of it at most: contexts grow with the card.
        """
        if self.context_bytes != CONTEXT_BYTES:
            return self.outside_bytes
        seen_bytes = min(CONTEXT_SEEN_BYTES[1], self.capacity_bytes // 8)
        return max(self.context_bytes, seen_bytes) + self.communication_bytes


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """A CPU: nothing is rounded, and nothing is cached for reuse.

    Attributes:
        name: Its name.
        capacity_bytes: The memory that training can use; None if unknown.
        caveats: What was assumed, one sentence each.
    """

    name: str = "CPU"
    capacity_bytes: int | None = None
    caveats: tuple[str, ...] = (
        "On a CPU only the memory of tensors is counted, without rounding and without scratch "
        "memory inside operators.",
    )

    @property
    def context_bytes(self) -> int:
        """0: there is no context."""
        return 0

    @property
    def outside_bytes(self) -> int:
        """0: everything is counted."""
        return 0

    @property
    def most_outside_bytes(self) -> int:
        """0: everything is counted."""
        return 0

    @property
    def allocator_capacity_bytes(self) -> int | None:
        """The same as `capacity_bytes`."""
        return self.capacity_bytes


#: What NCCL uses on each card for one communicator, the least and the most reported: 544 and 688
#: MiB with two and four A100 (github.com/NVIDIA/nccl/issues/964), 1.6 GB (issues/864). It depends
#: on the number of channels, and so on the links between the cards.
NCCL_BYTES = (544 * MiB, 1_600_000_000)
#: A device that a step can be predicted for.
Device = DeviceSpec | HostSpec
#: An assumption: a CUDA context with PyTorch's kernels. What it depends on:
#: - Whether kernels are loaded when they are first needed: from CUDA 11.7 on, and PyTorch turns it
#:   on (CUDA_MODULE_LOADING=LAZY, github.com/pytorch/pytorch/pull/86509). There 254 MiB were seen
#:   after one tensor and 616 MiB with all kernels (287,047,680 and 666,632,192 bytes minus the
#:   tensor's segment of 20 MiB, PyTorch 1.13); about 300 and 400 MiB in issues/107667 and 109888;
#:   426 MiB before any kernel (PyTorch 2.10, RTX 6000 Ada: github.com/unslothai/unsloth-zoo/pull/
#:   1053). Before CUDA 11.7 all kernels are in it: `EAGER_CONTEXT_BYTES`.
#: - The libraries whose kernels a program uses; cuDNN's, cuBLAS's.
#: - The card, and the driver.
#: 630 to 812 MiB were measured in 135 trainings and 39 compiled steps on an H100 (PyTorch 2.11,
#: CUDA 13.0; NVML, by process), where the driver keeps 480 MiB more of the card's 81,559 MiB:
#: benchmarks/results/nvidia-h100-80gb-hbm3-2026-11-26. benchmarks/device_facts.py measures it.
CONTEXT_BYTES = 512 * MiB
#: The least and the most that was seen outside the allocator where kernels are loaded when they
#: are needed. The most: what nvidia-smi shows of an A100 in a training of almost no parameters,
#: 1,451 MiB minus 22 MiB of segments (github.com/itu-rad/GPUMemNet, PyTorch 2), which counts what
#: the driver keeps, too.
CONTEXT_SEEN_BYTES = (254 * MiB, 1_429 * MiB)
#: With all kernels in the context: 1,644 MiB minus a segment of 158 MiB on an RTX 3090 (CUDA 11.1,
#: github.com/pytorch/pytorch/issues/49877). 1,343 MiB were seen on a V100 (perf_train_gpu_one.mdx
#: of huggingface/transformers, PyTorch 1.10).
EAGER_CONTEXT_BYTES = 1_486 * MiB


def _spec(
    name: str,
    capability: tuple[int, int],
    num_sms: int,
    memory_mib: int,
    l2_kib: int,
    mhz: int,
    memory_mhz: int,
) -> DeviceSpec:
    optin_bytes, num_threads, num_blocks = cards.ARCHITECTURES[capability]
    return DeviceSpec(
        name=name,
        capacity_bytes=memory_mib * MiB,
        compute_capability=capability,
        num_multiprocessors=num_sms,
        shared_memory_per_block_bytes=cards.SHARED_MEMORY_PER_BLOCK_BYTES,
        shared_memory_per_block_optin_bytes=optin_bytes,
        max_threads_per_multiprocessor=num_threads,
        max_blocks_per_multiprocessor=num_blocks,
        l2_cache_bytes=l2_kib << 10,
        clock_khz=mhz * 1000,
        memory_clock_khz=memory_mhz * 1000,
        context_bytes=CONTEXT_BYTES,
    )


_KINDS = {kind: tuple(_spec(*card) for card in of_kind) for kind, of_kind in cards.CARDS.items()}
#: All cards of NVIDIA that are known by name.
CATALOGUE: tuple[DeviceSpec, ...] = tuple(spec for specs in _KINDS.values() for spec in specs)
#: The architecture that is assumed if only a size is known, and another whose libraries take the
#: other size of workspace (`cublas_workspace_bytes`).
_ANY, _OTHER = _KINDS["A100"][0], _KINDS["H100"][0]
_OF_AMD = (
    f"A card of AMD is predicted with the kernels of {_ANY.name}, and with workspaces of hipBLAS "
    "and hipBLASLt as PyTorch's source has them. Convolutions, recurrent layers and attention may "
    "need more or less. We have measured nothing on this card."
)
_KINDS |= {
    name: (
        replace(
            _ANY,
            name=name,
            capacity_bytes=memory_gib * GiB,
            amd_architecture=architecture,
            caveats=(_OF_AMD,),
        ),
    )
    for name, architecture, memory_gib in cards.AMD_CARDS
}
#: All cards that are known by name, AMD's too.
ALL_CARDS: tuple[DeviceSpec, ...] = tuple(spec for specs in _KINDS.values() for spec in specs)
#: PyTorch's names for devices of this machine.
_LOCAL_CUDA = re.compile(r"cuda(:\d+)?")
_CPU = re.compile(r"cpu(:\d+)?")
#: A size as cards are sold, and the sizes of cards: makers write GB and mean GiB.
_SOLD = re.compile(r"(\d+)\s*gb")
_SOLD_GB = frozenset({8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192, 256})
#: A size, possibly with a wrong unit; `5070 ti` is a card.
_LIKE_A_SIZE = re.compile(r"-?\s*[\d.,_]+\s*(?!ti$)[kmgt][a-z]*")


def names_local_device(device: object) -> bool:
    """Whether this is PyTorch's name for a CUDA device of this machine: `cuda`, `cuda:1`."""
    return isinstance(device, str) and _LOCAL_CUDA.fullmatch(device.strip().lower()) is not None


def find_device(device: str | int | Device, *, like: DeviceSpec | None = None) -> Device:
    """A card by name or memory size, or a CPU; `resolve` also knows devices of this machine.

    Of several cards that a name may mean, the one with the least memory is taken: what fits there
    fits the others. A size of cards as they are sold, such as `24GB`, means GiB. Both are caveats.

    Examples:
        >>> find_device("a100-40gb").name
        'NVIDIA A100-SXM4-40GB'
    """
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        return _of_size(_large_enough(device, _num_bytes(device)), like or _ANY)
    text = device.strip().lower()
    if _CPU.fullmatch(text):
        return HostSpec()
    if names_local_device(text):
        raise ValueError(
            f"{device!r} is a device of this machine, and only cards can be looked up here. Give "
            "the name of a card or the size of its memory, such as '24GiB'; memcallback.predict "
            "takes the device."
        )
    sold = _SOLD.fullmatch(text)
    if sold and int(sold[1]) in _SOLD_GB:
        card = _of_size(int(sold[1]) * GiB, like or _ANY)
        caveat = f"{device!r} was read as {sold[1]} GiB: vendors of cards write GB for GiB."
        return replace(card, caveats=(caveat, *card.caveats))
    size_bytes = _size(device)
    if size_bytes is not None and size_bytes >= MiB:
        return _of_size(size_bytes, like or _ANY)
    words = set(cards.words_of(device))
    matches = [spec for spec in ALL_CARDS if words == set(cards.words_of(spec.name))] or [
        spec for spec in ALL_CARDS if cards.may_mean(words, spec.name, spec.capacity_bytes)
    ]
    if not matches and size_bytes is not None:
        _large_enough(device, size_bytes)
    num_kinds = sum(any(spec in matches for spec in specs) for specs in _KINDS.values())
    if num_kinds != 1:
        raise ValueError(_unknown(device, [spec.name for spec in matches]))
    if len(matches) == 1:
        return matches[0]
    smallest = min(matches, key=lambda spec: spec.capacity_bytes)
    names = " or ".join(spec.name for spec in matches if spec is not smallest)
    caveat = f"{device!r} was read as {smallest.name}; it may also mean {names}."
    return replace(smallest, caveats=(caveat,))


def architectures(device: Device) -> tuple[Device, ...]:
    """The device; one of which only the size was given also with the other architecture."""
    if not isinstance(device, DeviceSpec) or device.architecture_of != _ANY.name:
        return (device,)
    like = replace(_OTHER, torch_version=device.torch_version)
    other = _of_size(device.capacity_bytes, like)
    return (device, replace(other, caveats=(*device.caveats[:-1], *other.caveats)))


def _num_bytes(device: object) -> int:
    try:
        if not isinstance(device, bool):
            return parse_bytes(operator.index(device))  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(
        "device must be the name of a card, a size of memory or 'cpu', got "
        f"{described(device)}. Give one such as 'NVIDIA A100-SXM4-80GB' or '24GiB'; a device of "
        "this machine goes to memcallback.predict."
    )


def _size(text: str) -> int | None:
    """Parse a size, or the number in a card's name, such as 4090; None if the text is neither."""
    try:
        return parse_bytes(text)
    except ValueError:
        if _LIKE_A_SIZE.fullmatch(text.strip().lower()):
            raise
        return None


def _large_enough(device: object, size_bytes: int) -> int:
    if size_bytes < MiB:
        raise ValueError(
            f"{device!r} is neither a card nor a card's size: a plain number means bytes, and must "
            "be at least 1 MiB. Give the size with its unit, such as '24GiB', the name of a card, "
            "or 'cuda:0' to predict for a device of this machine."
        )
    return size_bytes


def _of_size(capacity_bytes: int, like: DeviceSpec) -> DeviceSpec:
    text = (
        f"Only the size of the card is known, {format_bytes(capacity_bytes)}. Workspaces and "
        "kernels depend on its architecture, which is assumed to be that of "
        f"{like.name} ({like.architecture}). Name the card if you know it."
    )
    return replace(
        like,
        name=f"a card of {format_bytes(capacity_bytes)}",
        capacity_bytes=capacity_bytes,
        caveats=(text, *((_OF_AMD,) if like.amd_architecture else ())),
        local_index=None,
        architecture_of=like.name,
    )


def _unknown(text: str, similar: list[str]) -> str:
    if not similar or len(similar) > 8:
        known = {kind.lower(): specs[0].name for kind, specs in _KINDS.items()}
        known |= {" ".join(cards.words_of(spec.name)): spec.name for spec in ALL_CARDS}
        # With the words that makers use, without, and each word alone.
        words = cards.words_of(text)
        near = [
            known[name]
            for asked in (text.lower(), " ".join(words), *words)
            for name in difflib.get_close_matches(asked, list(known), n=3, cutoff=0.5)
        ]
        some = [specs[0].name for specs in _KINDS.values()][:6]
        names = ", ".join([*dict.fromkeys(near)][:4] or some)
        return (
            f"{text!r} is not a known card. {'Similar' if near else 'Known'} names: {names}. Give "
            "one of them, or the size of its memory, such as '24GiB'."
        )
    return (
        f"{text!r} may mean {', '.join(similar)}. Give more of the name, or the size of its "
        "memory, such as '24GiB'."
    )
