"""DeviceSpec, HostSpec, the catalogue of cards, and find_device(): lookup by name or size."""

from __future__ import annotations

import difflib
import operator
import re
from dataclasses import dataclass, replace

from memcallback.core.units import GiB, MiB, format_bytes, parse_bytes
from memcallback.core.validation import described


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

    @property
    def cublas_workspace_bytes(self) -> int:
        """The workspace of each cuBLAS handle."""
        return cublas_workspace_bytes(self.compute_capability[0])

    @property
    def allocator_capacity_bytes(self) -> int:
        """What the caching allocator can have: the capacity minus `outside_bytes`, at least 0."""
        return max(0, self.capacity_bytes - self.outside_bytes)

    @property
    def outside_bytes(self) -> int:
        """What this process uses outside the allocator: context and communication library."""
        return self.context_bytes + self.communication_bytes


def cublas_workspace_bytes(major: int) -> int:
    """The workspace that each cuBLAS handle keeps on a device of a major compute capability.

    Source: `getChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp of PyTorch 2.11 to 2.13.
    CUBLAS_WORKSPACE_CONFIG would change it; it is not followed.
    """
    return 32 * MiB if major in (9, 10, 12) else 8_519_680


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
        "On a CPU, bytes live in storages are counted: nothing is rounded and nothing reserved. "
        "Scratch memory inside operators is left out of the peaks.",
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
    def allocator_capacity_bytes(self) -> int | None:
        """The same as `capacity_bytes`."""
        return self.capacity_bytes


#: What NCCL uses on each card for one communicator, the least and the most reported: 544 and 688
#: MiB with two and four A100 (github.com/NVIDIA/nccl/issues/964), 1.6 GB (issues/864). It depends
#: on the number of channels, and so on the links between the cards.
NCCL_BYTES = (544 * MiB, 1_600_000_000)
#: A device that a step can be predicted for.
Device = DeviceSpec | HostSpec
#: An assumption: a CUDA context with PyTorch's kernels. It differs between cards and drivers and
#: grows with the kernels that are loaded (CUDA C++ Programming Guide, "Lazy Loading"). Reported
#: were 254 MiB after one tensor and 616 MiB with all kernels (287,047,680 and 666,632,192 bytes
#: minus the tensor's segment of 20 MiB, PyTorch 1.13: github.com/pytorch/pytorch/pull/86509) and
#: 426 MiB before any (PyTorch 2.10, RTX 6000 Ada: github.com/unslothai/unsloth-zoo/pull/1053).
#: benchmarks/device_facts.py measures it.
CONTEXT_BYTES = 512 * MiB
#: Compute capability -> shared memory per block with opting in, in bytes; threads and blocks per
#: multiprocessor. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute
#: Capability" ("Maximum amount of shared memory per thread block", "Maximum number of resident
#: threads per SM", "Maximum number of resident blocks per SM").
_ARCHITECTURES = {
    (7, 0): (96 << 10, 2048, 32),
    (7, 5): (64 << 10, 1024, 16),
    (8, 0): (163 << 10, 2048, 32),
    (8, 6): (99 << 10, 1536, 16),
    (8, 9): (99 << 10, 1536, 24),
    (9, 0): (227 << 10, 2048, 32),
    (10, 0): (227 << 10, 2048, 32),
    (12, 0): (99 << 10, 1536, 24),
}
#: Shared memory of a block that does not opt in for more, on every card since Fermi. Source: the
#: same guide, "Shared Memory".
_SHARED_MEMORY_PER_BLOCK_BYTES = 48 << 10
#: Kind -> its cards. The kind's name alone means the first of those with the least memory.
#:
#: Each card: the driver's name, compute capability, multiprocessors, memory in MiB, KiB of L2
#: cache, MHz of the multiprocessors' largest boost and of the memory. Sources:
#:  - compute capability: NVIDIA, "CUDA GPU Compute Capability", developer.nvidia.com/cuda-gpus;
#:  - memory: NVML's total, which nvidia-smi shows as memory.total. The driver keeps some of it:
#:    CUDA's totalGlobalMem, which PyTorch's out-of-memory message shows, was 250 MiB less on a
#:    Tesla T4 and 621 MiB less on an A100-SXM4-40GB (deviceQuery);
#:  - multiprocessors, L2 cache and clocks: NVIDIA's architecture whitepapers (Volta V100, Turing,
#:    Ampere A100, Ampere GA102, Ada, Hopper H100, RTX Blackwell) and the cards' product briefs, as
#:    cudaGetDeviceProperties writes them: the memory's clock is half or a quarter of the data rate
#:    per pin;
#:  - a driver's output: B200 in github.com/pytorch/ao/pull/4002, the memory of L40S in
#:    github.com/akash-network/provider-configs/pull/99, A100-SXM4-40GB (deviceQuery) in
#:    github.com/bottlerocket-os/bottlerocket/pull/3873, and the eight cards of
#:    tests/devices/test_catalogue.py. The values of other cards have not been checked on a card.
_CARDS: dict[str, tuple[tuple[str, tuple[int, int], int, int, int, int, int], ...]] = {
    "B200": (("NVIDIA B200", (10, 0), 148, 183_359, 129_536, 1965, 3996),),
    "H200": (("NVIDIA H200", (9, 0), 132, 143_771, 61_440, 1980, 3201),),
    "H100": (
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 81_559, 51_200, 1980, 2619),
        ("NVIDIA H100 PCIe", (9, 0), 114, 81_559, 51_200, 1755, 1593),
        ("NVIDIA H100 NVL", (9, 0), 132, 95_830, 61_440, 1785, 2619),
    ),
    "A100": (
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81_920, 40_960, 1410, 1593),
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40_960, 40_960, 1410, 1215),
        ("NVIDIA A100 80GB PCIe", (8, 0), 108, 81_920, 40_960, 1410, 1512),
        ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 40_960, 40_960, 1410, 1215),
    ),
    "A30": (("NVIDIA A30", (8, 0), 56, 24_576, 24_576, 1440, 1215),),
    "A40": (("NVIDIA A40", (8, 6), 84, 46_068, 6_144, 1740, 7251),),
    "A10": (("NVIDIA A10", (8, 6), 72, 23_028, 6_144, 1695, 6251),),
    "A10G": (("NVIDIA A10G", (8, 6), 80, 23_028, 6_144, 1710, 6251),),
    "L4": (("NVIDIA L4", (8, 9), 58, 23_034, 49_152, 2040, 6251),),
    "L40": (("NVIDIA L40", (8, 9), 142, 46_068, 98_304, 2490, 9001),),
    "L40S": (("NVIDIA L40S", (8, 9), 142, 46_068, 98_304, 2520, 9001),),
    "T4": (("Tesla T4", (7, 5), 40, 15_360, 4_096, 1590, 5001),),
    "V100": (
        ("Tesla V100-SXM2-16GB", (7, 0), 80, 16_384, 6_144, 1530, 877),
        ("Tesla V100-SXM2-32GB", (7, 0), 80, 32_768, 6_144, 1530, 877),
        ("Tesla V100-PCIE-16GB", (7, 0), 80, 16_384, 6_144, 1380, 877),
        ("Tesla V100-PCIE-32GB", (7, 0), 80, 32_768, 6_144, 1380, 877),
    ),
    "RTX 2080 Ti": (("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 11_264, 5_632, 1545, 7000),),
    "RTX 3080": (("NVIDIA GeForce RTX 3080", (8, 6), 68, 10_240, 5_120, 1710, 9501),),
    "RTX 3090": (("NVIDIA GeForce RTX 3090", (8, 6), 82, 24_576, 6_144, 1695, 9751),),
    "RTX 4080": (("NVIDIA GeForce RTX 4080", (8, 9), 76, 16_376, 65_536, 2505, 11_201),),
    "RTX 4090": (("NVIDIA GeForce RTX 4090", (8, 9), 128, 24_564, 73_728, 2520, 10_501),),
    "RTX 5090": (("NVIDIA GeForce RTX 5090", (12, 0), 170, 32_607, 98_304, 2407, 14_001),),
    "RTX A5000": (("NVIDIA RTX A5000", (8, 6), 64, 24_564, 6_144, 1695, 8001),),
    "RTX A6000": (("NVIDIA RTX A6000", (8, 6), 84, 49_140, 6_144, 1800, 8001),),
    "RTX 6000 Ada": (
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 49_140, 98_304, 2505, 10_001),
    ),
}


def _spec(
    name: str,
    capability: tuple[int, int],
    num_sms: int,
    memory_mib: int,
    l2_kib: int,
    mhz: int,
    memory_mhz: int,
) -> DeviceSpec:
    optin_bytes, num_threads, num_blocks = _ARCHITECTURES[capability]
    return DeviceSpec(
        name=name,
        capacity_bytes=memory_mib * MiB,
        compute_capability=capability,
        num_multiprocessors=num_sms,
        shared_memory_per_block_bytes=_SHARED_MEMORY_PER_BLOCK_BYTES,
        shared_memory_per_block_optin_bytes=optin_bytes,
        max_threads_per_multiprocessor=num_threads,
        max_blocks_per_multiprocessor=num_blocks,
        l2_cache_bytes=l2_kib << 10,
        clock_khz=mhz * 1000,
        memory_clock_khz=memory_mhz * 1000,
        context_bytes=CONTEXT_BYTES,
    )


_KINDS = {kind: tuple(_spec(*card) for card in cards) for kind, cards in _CARDS.items()}
#: All cards that are known by name.
CATALOGUE: tuple[DeviceSpec, ...] = tuple(spec for specs in _KINDS.values() for spec in specs)
#: The architecture that is assumed if only a size is known, and another whose libraries take the
#: other size of workspace (`cublas_workspace_bytes`).
_ANY, _OTHER = _KINDS["A100"][0], _KINDS["H100"][0]
#: PyTorch's names for devices of this machine.
_LOCAL_CUDA = re.compile(r"cuda(:\d+)?")
_CPU = re.compile(r"cpu(:\d+)?")
#: A size as cards are sold, and the sizes of cards: makers write GB and mean GiB.
_SOLD = re.compile(r"(\d+)\s*gb")
_SOLD_GB = frozenset({8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141, 192})
#: A size, possibly with a wrong unit.
_LIKE_A_SIZE = re.compile(r"-?\s*[\d.,_]+\s*[kmgt][a-z]*")


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
            f"{device!r} is a device of this machine, which cannot be looked up here. Give it to "
            "memcallback.predict; or here the name of a card, or the size of its memory, such as "
            "'24GiB'."
        )
    sold = _SOLD.fullmatch(text)
    if sold and int(sold[1]) in _SOLD_GB:
        card = _of_size(int(sold[1]) * GiB, like or _ANY)
        caveat = f"{device!r} was taken for {sold[1]} GiB: cards are sold by GiB, called GB."
        return replace(card, caveats=(caveat, *card.caveats))
    size_bytes = _size(device)
    if size_bytes is not None and size_bytes >= MiB:
        return _of_size(size_bytes, like or _ANY)
    words = set(_words(device))
    matches = [spec for spec in CATALOGUE if words == set(_words(spec.name))] or [
        spec for spec in CATALOGUE if _matches(words, spec)
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
    caveat = f"{device!r} was taken for {smallest.name}; it may also mean {names}."
    return replace(smallest, caveats=(caveat,))


def architectures(device: Device) -> tuple[Device, ...]:
    """The device; one of which only the size was given also with the other architecture."""
    if not isinstance(device, DeviceSpec) or device.architecture_of != _ANY.name:
        return (device,)
    other = _of_size(device.capacity_bytes, _OTHER)
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
            f"{device!r} is neither a card nor its size: a number is a size in bytes, at least "
            "1 MiB. Give the size with its unit, such as '24GiB', the name of a card, or 'cuda:0' "
            "to predict for a device of this machine."
        )
    return size_bytes


def _of_size(capacity_bytes: int, like: DeviceSpec) -> DeviceSpec:
    major, minor = like.compute_capability
    text = (
        f"Only the size of the card is known, {format_bytes(capacity_bytes)}: its architecture was "
        f"taken to be that of {like.name} (compute capability {major}.{minor}), which decides "
        "workspaces and kernels. Name the card for its own."
    )
    return replace(
        like,
        name=f"a card of {format_bytes(capacity_bytes)}",
        capacity_bytes=capacity_bytes,
        caveats=(text,),
        local_index=None,
        architecture_of=like.name,
    )


#: Words that do not distinguish cards: makers' and series' names.
_MAKERS = frozenset({"nvidia", "geforce", "tesla", "rtx", "generation"})


def _words(text: str) -> tuple[str, ...]:
    """The words of a name that distinguish cards: `4090` of `GeForce RTX4090`."""
    words = re.sub(r"\brtx(?=\d)", "rtx ", text.lower())
    return tuple(word for word in re.findall(r"[a-z0-9]+", words) if word not in _MAKERS)


#: Words of names -> what people say instead. The driver's name of the H100 lacks the word SXM.
_ALIASES = {"sxm2": "sxm", "sxm4": "sxm", "hbm3": "sxm"}


def _matches(words: set[str], spec: DeviceSpec) -> bool:
    """Whether every word is in the card's name; `80` also means `80gb`, `sxm` also `sxm4`."""
    names = _words(spec.name)
    return bool(words) and all(
        any(word in (name, name.removesuffix("gb"), _ALIASES.get(name)) for name in names)
        for word in words
    )


def _unknown(text: str, similar: list[str]) -> str:
    if not similar or len(similar) > 8:
        by_words = {" ".join(_words(name)): name for name in (spec.name for spec in CATALOGUE)}
        nearest = difflib.get_close_matches(" ".join(_words(text)), list(by_words), n=3, cutoff=0.4)
        similar = [by_words[words] for words in nearest] or [
            specs[0].name for specs in _KINDS.values()
        ][:6]
        return (
            f"{text!r} is not a known card. Similar names: {', '.join(similar)}. Give one of them, "
            "or the size of its memory, such as '24GiB'."
        )
    return (
        f"{text!r} may mean {', '.join(similar)}. Give more of the name, or the size of its "
        "memory, such as '24GiB'."
    )
