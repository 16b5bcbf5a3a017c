"""Which rows of `real_gpus.py` are off, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MiB = 1 << 20
#: Above this a peak of PyTorch's allocator is off: the bar of the median.
_ALLOCATOR = 0.005
#: Above this nvidia-smi's value is: so far apart are xMem's own repeats.
_NVIDIA_SMI = 0.026
#: Above this a single operator's peak is; less is the rounding of a published decimal.
_OPERATOR = 1e-6
#: What a context was seen to grow by when libraries load kernels: from 619 to 863 MiB on an H200
#: (docs/real-gpus.md).
_KERNELS_BYTES = (863 - 619) * MiB

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
    lacking_bytes = row["value"] - row["predicted"] if row["measured"] == "nvidia_smi_used" else 0
    return bool(0 < lacking_bytes <= _KERNELS_BYTES)


def _is_of_one_block(row: Row) -> bool:
    return bool("operator" in row and abs(row["value"] - row["predicted"]) <= 1 * MiB)


#: The first that explains a row is its reason.
REASONS = (
    Reason(
        "unknowable",
        "cudnn.benchmark was on: cuDNN measured which algorithm was fastest on the card",
        _named("timm-"),
    ),
    Reason(
        "unknowable",
        "a part of the program was not published and is inferred or a guess",
        lambda row: row["trust"] == "C" and not row["id"].startswith("peft-prefix"),
    ),
    Reason(
        "ours",
        "a context grows when libraries load kernels, and we predict none that grows",
        _lacks_kernels,
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
        _named("gpumemnet-", "liger-multi_token", "liger-sparse_multi_token"),
    ),
    Reason(
        "ours",
        "PyTorch 1.10 and the optimizer of its Trainer ran, which we have not rebuilt",
        _named("hf-bertlarge"),
    ),
    Reason("unknowable", "the batch size was not published and is inferred", _named("colossal-")),
    Reason(
        "unknowable",
        "at most 1 MiB, by which a block is rounded up: that depends on what ran before",
        _is_of_one_block,
    ),
    Reason("ours", "we have not found what is missing", lambda row: True),
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
