"""The cards that are known by name, which words mean one, and what architectures have in common."""

from __future__ import annotations

import re

#: Compute capability -> shared memory per block with opting in, in bytes; threads and blocks per
#: multiprocessor. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute
#: Capability" ("Maximum amount of shared memory per thread block", "Maximum number of resident
#: threads per SM", "Maximum number of resident blocks per SM").
ARCHITECTURES = {
    (7, 0): (96 << 10, 2048, 32),
    (7, 5): (64 << 10, 1024, 16),
    (8, 0): (163 << 10, 2048, 32),
    (8, 6): (99 << 10, 1536, 16),
    (8, 9): (99 << 10, 1536, 24),
    (9, 0): (227 << 10, 2048, 32),
    (10, 0): (227 << 10, 2048, 32),
    (10, 3): (227 << 10, 2048, 32),
    (12, 0): (99 << 10, 1536, 24),
}
#: Shared memory of a block that does not opt in for more, on every card since Fermi. Source: the
#: same guide, "Shared Memory".
SHARED_MEMORY_PER_BLOCK_BYTES = 48 << 10
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
#:    tests/devices/test_catalogue.py. The values of other cards have not been checked on a card;
#:  - nvidia-smi's memory.total as users published it: B300, GB200, H20, RTX 5080, RTX 5070 Ti and
#:    RTX PRO 6000. L2 cache and clocks of GB200 and B300 are assumed to be those of B200.
CARDS: dict[str, tuple[tuple[str, tuple[int, int], int, int, int, int, int], ...]] = {
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
    "A800": (
        ("NVIDIA A800-SXM4-80GB", (8, 0), 108, 81_920, 40_960, 1410, 1593),
        ("NVIDIA A800 80GB PCIe", (8, 0), 108, 81_920, 40_960, 1410, 1512),
    ),
    "B300": (("NVIDIA B300 SXM6 AC", (10, 3), 148, 275_040, 129_536, 1965, 3996),),
    "GB200": (("NVIDIA GB200", (10, 0), 152, 189_471, 129_536, 1965, 3996),),
    "H800": (("NVIDIA H800", (9, 0), 132, 81_559, 51_200, 1980, 2619),),
    "H20": (("NVIDIA H20", (9, 0), 78, 97_871, 61_440, 1980, 2619),),
    "A30": (("NVIDIA A30", (8, 0), 56, 24_576, 24_576, 1440, 1215),),
    "A40": (("NVIDIA A40", (8, 6), 84, 46_068, 6_144, 1740, 7251),),
    "A10": (("NVIDIA A10", (8, 6), 72, 23_028, 6_144, 1695, 6251),),
    "A10G": (("NVIDIA A10G", (8, 6), 80, 23_028, 6_144, 1710, 6251),),
    "L4": (("NVIDIA L4", (8, 9), 58, 23_034, 49_152, 2040, 6251),),
    "L20": (("NVIDIA L20", (8, 9), 92, 46_068, 98_304, 2520, 9001),),
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
    "RTX 3060": (("NVIDIA GeForce RTX 3060", (8, 6), 28, 12_288, 2_304, 1777, 7501),),
    "RTX 3080": (("NVIDIA GeForce RTX 3080", (8, 6), 68, 10_240, 5_120, 1710, 9501),),
    "RTX 3090": (("NVIDIA GeForce RTX 3090", (8, 6), 82, 24_576, 6_144, 1695, 9751),),
    "RTX 4060": (("NVIDIA GeForce RTX 4060", (8, 9), 24, 8_188, 24_576, 2460, 8501),),
    "RTX 4080": (("NVIDIA GeForce RTX 4080", (8, 9), 76, 16_376, 65_536, 2505, 11_201),),
    "RTX 4090": (("NVIDIA GeForce RTX 4090", (8, 9), 128, 24_564, 73_728, 2520, 10_501),),
    "RTX 5070 Ti": (("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 16_303, 49_152, 2452, 14_001),),
    "RTX 5080": (("NVIDIA GeForce RTX 5080", (12, 0), 84, 16_303, 65_536, 2617, 15_001),),
    "RTX 5090": (("NVIDIA GeForce RTX 5090", (12, 0), 170, 32_607, 98_304, 2407, 14_001),),
    "RTX A5000": (("NVIDIA RTX A5000", (8, 6), 64, 24_564, 6_144, 1695, 8001),),
    "RTX A6000": (("NVIDIA RTX A6000", (8, 6), 84, 49_140, 6_144, 1800, 8001),),
    "RTX 6000 Ada": (
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 49_140, 98_304, 2505, 10_001),
    ),
    "RTX PRO 6000": tuple(
        (f"NVIDIA RTX PRO 6000 Blackwell {edition}", (12, 0), 188, 97_887, 131_072, 2617, 14_001)
        for edition in ("Workstation Edition", "Max-Q Workstation Edition", "Server Edition")
    ),
}
#: Cards of AMD: the driver's name, architecture, memory in GiB. PyTorch sees each half of an MI250
#: and MI250X as a device of its own. Source: AMD, "AMD GPU specifications",
#: rocm.docs.amd.com/en/latest/reference/gpu-specs.html.
AMD_CARDS = (
    ("AMD Instinct MI355X", "gfx950", 288),
    ("AMD Instinct MI350X", "gfx950", 288),
    ("AMD Instinct MI325X", "gfx942", 256),
    ("AMD Instinct MI300X", "gfx942", 192),
    ("AMD Instinct MI300A", "gfx942", 128),
    ("AMD Instinct MI250X", "gfx90a", 64),
    ("AMD Instinct MI250", "gfx90a", 64),
    ("AMD Instinct MI210", "gfx90a", 64),
    ("AMD Instinct MI100", "gfx908", 32),
    ("AMD Radeon PRO W7900", "gfx1100", 48),
    ("AMD Radeon RX 7900 XTX", "gfx1100", 24),
    ("AMD Radeon RX 7900 XT", "gfx1100", 20),
)
#: Words that do not distinguish cards: makers' and series' names.
_MAKERS = frozenset(
    {"nvidia", "geforce", "tesla", "rtx", "generation", "amd", "instinct", "radeon", "rx"}
)
#: Words of names -> what people say instead. The driver's name of the H100 lacks the word SXM.
_ALIASES = {"sxm2": "sxm", "sxm4": "sxm", "hbm3": "sxm"}
#: Words that make another card of a name, which the name alone does not mean.
_OF_ANOTHER_CARD = frozenset({"ti"})


def words_of(name: str) -> tuple[str, ...]:
    """The words of a name that distinguish cards: `4090` of `GeForce RTX4090`."""
    words = re.sub(r"\brtx(?=\d)", "rtx ", name.lower())
    words = re.sub(r"(?<=\d)(ti|xtx|xt)\b", r" \1", words)
    words = re.sub(r"\b(\d+)\s*(?:g|gb|gib)\b", r"\1gb", words)
    found = re.findall(r"[a-z0-9]+", words.replace("sxm5", "sxm"))
    return tuple(word for word in found if word not in _MAKERS)


def may_mean(words: set[str], name: str, capacity_bytes: int) -> bool:
    """Whether every word is in the card's name; `80` also means `80gb`, `sxm` also `sxm4`.

    A number of gigabytes may also be that of the card's memory as it is sold. One word with a digit
    is in the name as it is: a size or an architecture alone is no name.
    """
    names = words_of(name)
    if _OF_ANOTHER_CARD & set(names) - words:
        return False
    if not any(word in names and re.search(r"\d", word) for word in words):
        return False
    return all(
        any(word in (name, name.removesuffix("gb"), _ALIASES.get(name)) for name in names)
        or _is_sold_with(word, capacity_bytes)
        for word in words
    )


def _is_sold_with(word: str, capacity_bytes: int) -> bool:
    """Whether a word such as `24gb` is a card's memory: its driver shows up to 7 % less."""
    size = re.fullmatch(r"(\d+)gb", word)
    return size is not None and 0.93 <= capacity_bytes / (int(size[1]) << 30) <= 1.01
