"""Which rows of `real_gpus.py` are off, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MiB = 1 << 20
#: Above this a peak of PyTorch's allocator is off: the bar of the median.
_ALLOCATOR = 0.005
#: Above this nvidia-smi's value is: so far the repeats of one source (xMem) are apart.
_NVIDIA_SMI = 0.026
#: Above this a single operator's peak is; less is the rounding of a published decimal.
_OPERATOR = 1e-6
#: What a context was seen to grow by when libraries load kernels: 619 to 863 MiB on an H200
#: (docs/real-gpus.md). Twice that is still taken for it.
_KERNELS_BYTES = 2 * (863 - 619) * MiB

Row = dict[str, Any]


@dataclass(frozen=True)
class Reason:
    """Why rows are off.

    Attributes:
        whose: `ours`: something is missing in the prediction, or we have not found what;
            `unknowable`: it depends on what nobody recorded. None is the mistake of a source.
        text: One sentence.
        explains: Whether it explains a row that is off.
    """

    whose: Literal["ours", "unknowable"]
    text: str
    explains: Callable[[Row], bool]


def _named(*starts: str) -> Callable[[Row], bool]:
    return lambda row: row["id"].startswith(starts)


def _lacks_kernels(row: Row) -> bool:
    """Whether nvidia-smi shows a little more than was predicted."""
    if row["measured"] != "nvidia_smi_used":
        return False
    return bool(0 < row["value"] - row["predicted"] <= _KERNELS_BYTES)


#: The first that explains a row is its reason.
REASONS = (
    Reason(
        "unknowable",
        "cudnn.benchmark was on: cuDNN measured which algorithm was fastest on the card",
        _named("timm-"),
    ),
    Reason(
        "unknowable",
        "nvidia-smi counts the kernels that libraries load when they are first needed",
        lambda row: not row["id"].startswith("hf-") and _lacks_kernels(row),
    ),
    Reason(
        "ours",
        "cuDNN 9.1 ran, which answers on a card alone; we asked 9.19, which may choose other "
        "algorithms",
        _named("xmem-"),
    ),
    Reason(
        "unknowable",
        "cuDNN's version was not recorded, and another version may choose other algorithms",
        _named("gpumemnet-", "liger-multi_token_attention"),
    ),
    Reason(
        "unknowable",
        "PyTorch 1.10 and the Trainer of 2021: neither their allocator nor their optimizer is "
        "today's",
        _named("hf-bertlarge"),
    ),
    Reason(
        "unknowable",
        "the batch size is inferred",
        _named("colossal-"),
    ),
    Reason("unknowable", "precision and attention are guesses", _named("mesa-")),
    Reason(
        "unknowable",
        "a block is rounded up by at most 1 MiB, which depends on what ran before in the process",
        _named("liger-fused_moe", "liger-fused_neighborhood_attention"),
    ),
    Reason(
        "ours",
        "at most 16 KiB; we have not found what",
        lambda row: "operator" in row and abs(row["predicted"] - row["value"]) <= 16 * 1024,
    ),
    Reason(
        "unknowable",
        "the first step needs the most, and the length of the first batch was not recorded",
        _named("peft-full"),
    ),
    Reason(
        "ours",
        "for each virtual token 6 MiB are missing; we have not found what",
        _named("peft-prefixtuning"),
    ),
    Reason(
        "ours",
        "we have not found what; a development version of PEFT ran",
        _named("peft-"),
    ),
)


def is_off(row: Row) -> bool:
    """Whether a row is beyond the bar of what it measures."""
    if "error" not in row:
        return not row["is_right"]
    bar = _NVIDIA_SMI if row["measured"] == "nvidia_smi_used" else _ALLOCATOR
    return bool(abs(row["error"]) > (_OPERATOR if "operator" in row else bar))


def reason_of(row: Row) -> Reason:
    """The reason of a row that is off."""
    return next(reason for reason in REASONS if reason.explains(row))
