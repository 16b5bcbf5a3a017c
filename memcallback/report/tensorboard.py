"""Tags, scalars and the custom-scalars layout. Sizes are in GiB (2**30 bytes), with four digits.

| tag | meaning |
|---|---|
| `memory/<phase>/peak_allocated_gib` | measured peak in the largest step since the last point |
| `memory/predicted/<phase>/peak_allocated_gib` | predicted peak; the upper edge of a band |
| `memory/predicted/<phase>/low_gib` | predicted, the lower edge of the band (textbook law) |
| `memory/predicted/peak_reserved_gib` | predicted peak of reserved memory (traced step, no band) |
| `memory/peak_reserved_gib` | measured peak of reserved memory in that step (accelerators) |
| `memory/peak_resident_gib` | measured peak of the process's resident size in that step (CPU) |
| `memory/non_pytorch_gib` | used on the device outside this process's allocator (accelerators) |
| `memory/capacity_gib` | the device's memory |
| `memory/capacity_used_pct` | used of it by all processes, percent |
| `memory/prediction_error_pct` | predicted minus measured peak, percent of it; steady steps only |
| `memory/num_alloc_retries` | retries of the allocator after releasing its cache (accelerators) |
| `device/utilisation_pct` | share of the last moments in which a kernel ran, percent (NVML) |
| `device/temperature_celsius` | the temperature of the device's chip (NVML) |
| `device/power_watts` | the power draw of the device (NVML) |

In a job of several ranks these are rank zero's. Over the ranks there are at most 15 besides:

| tag | meaning |
|---|---|
| `memory/ranks/peak_allocated_min_gib`, `_mean_`, `_max_` | measured peaks over the ranks |
| `memory/ranks/peak_reserved_min_gib`, `_mean_`, `_max_` | the same of reserved memory |
| `memory/ranks/worst/rank` | the rank with the largest share of its capacity in use, the first |
| `memory/ranks/worst/capacity_share_pct` | that share: peak reserved (CPU: allocated), percent |
| `memory/ranks/worst/<phase>/peak_allocated_gib` | measured peaks of that rank |
| `memory/ranks/worst/predicted/<phase>/peak_allocated_gib` | predicted peaks of that rank |
| `memory/ranks/num_ranks` | the number of ranks that sent values |

`<phase>` is forward, backward or optimizer_step. An unknown value has no point.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memcallback.core.files import inside
from memcallback.core.step_memory import DeviceMemory, StepMemory, error_pct
from memcallback.core.types import Phase
from memcallback.core.units import GiB
from memcallback.report.rank_values import RankValues

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


REPORT_TAG = "memory/report"
STEP_IMAGE_TAG = "memory/step_by_category"
CURVE_IMAGE_TAG = "memory/batch_size_curve"
MODULES_TAG = "memory/modules"
MODULES_IMAGE_TAG = "memory/modules_icicle"
WHAT_IF_TAG = "memory/what_if"
WHAT_IF_IMAGE_TAG = "memory/what_if_bars"
OUT_OF_MEMORY_TAG = "memory/out_of_memory"
#: A run below the training's, for the layout alone: TensorBoard reads one layout a run, and a
#: user's own stays.
LAYOUT_RUN = "memory_layout"
_PEAK = "memory/{}/peak_allocated_gib"
_PREDICTED = "memory/predicted/{}/peak_allocated_gib"
_LOW = "memory/predicted/{}/low_gib"
_PREDICTED_RESERVED = "memory/predicted/peak_reserved_gib"
_OF_RANKS = "memory/ranks/peak_{}_{}_gib"
_WORST_PEAK = "memory/ranks/worst/{}/peak_allocated_gib"
_WORST_PREDICTED = "memory/ranks/worst/predicted/{}/peak_allocated_gib"
_WORST_RANK = "memory/ranks/worst/rank"
_WORST_SHARE = "memory/ranks/worst/capacity_share_pct"


def scalars(
    step: StepMemory, predicted: StepMemory | None, device: DeviceMemory
) -> dict[str, float]:
    """A value for each tag for which it is known: at most 15 of memory, and three of the device."""
    values: dict[str, float | None] = {}
    for phase, memory in step.phases.items():
        values[_PEAK.format(phase.value)] = _gib(memory.peak_allocated_bytes)
    for phase, memory in (predicted.phases if predicted else {}).items():
        values[_PREDICTED.format(phase.value)] = _gib(memory.peak_allocated_bytes)
        values[_LOW.format(phase.value)] = _gib(memory.low_bytes)
    if predicted:
        values[_PREDICTED_RESERVED] = _gib(predicted.peak_reserved_bytes)
    last = step.windows[-1].end if step.windows else None
    values["memory/peak_reserved_gib"] = _gib(step.peak_reserved_bytes)
    values["memory/peak_resident_gib"] = _gib(step.peak_resident_bytes)
    values["memory/non_pytorch_gib"] = _gib(device.non_pytorch_bytes)
    values["memory/capacity_gib"] = _gib(device.capacity_bytes)
    if device.capacity_bytes and device.used_bytes is not None:
        values["memory/capacity_used_pct"] = 100 * device.used_bytes / device.capacity_bytes
    if predicted and not step.is_warm_up:
        error = error_pct(predicted.peak_allocated_bytes, step.peak_allocated_bytes)
        # Rounded to a tenth, so that a curve of it does not show a few bytes more or less.
        values["memory/prediction_error_pct"] = None if error is None else round(error, 1)
    values["memory/num_alloc_retries"] = last.num_alloc_retries if last else None
    values["device/utilisation_pct"] = device.utilisation_pct
    values["device/temperature_celsius"] = device.temperature_celsius
    values["device/power_watts"] = device.power_watts
    return {tag: value for tag, value in values.items() if value is not None}


def rank_scalars(ranks: RankValues) -> dict[str, float]:
    """A value for each tag over the ranks for which it is known: at most 15."""
    worst = ranks.worst
    values: dict[str, float | None] = {
        _WORST_RANK: worst.rank,
        _WORST_SHARE: worst.capacity_share_pct,
    }
    for kind, spread in (("allocated", ranks.peak_allocated), ("reserved", ranks.peak_reserved)):
        for which, size in zip(("min", "mean", "max"), spread or (), strict=False):
            values[_OF_RANKS.format(kind, which)] = _gib(size)
    for phase in Phase:
        values[_WORST_PEAK.format(phase.value)] = _gib(worst.phases.get(phase))
        values[_WORST_PREDICTED.format(phase.value)] = _gib(worst.predicted.get(phase))
    values["memory/ranks/num_ranks"] = len(ranks.points)
    return {tag: value for tag, value in values.items() if value is not None}


def _gib(num_bytes: int | None) -> float | None:
    # Four digits: TensorBoard fits the axis to its values, and a curve would show little but a few
    # bytes more or less.
    return None if num_bytes is None else float(f"{num_bytes / GiB:.4g}")


def dashboard_command(log_dir: str) -> str:
    """The command that shows a run, as this console can run it."""
    program = "tensorboard"
    if shutil.which(program) is None:
        python = min(sys.executable, os.path.relpath(sys.executable), key=len)
        program = f"{shlex.quote(python)} -m tensorboard.main"
    if "://" not in log_dir:
        log_dir = min(log_dir, os.path.relpath(log_dir), key=len)
    return f"{program} --logdir {shlex.quote(log_dir)}"


def write_layout(log_dir: str, *, has_band: bool, rank_bands: Sequence[str] = ()) -> None:
    """Write the dashboard's layout beside a run, for the tab "Custom scalars"."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import FileWriter

    # TensorBoard shows charts with a band in reverse order.
    of_phases = (
        [_in_band(phase) for phase in reversed(Phase)]
        if has_band
        else [_pair(phase) for phase in Phase]
    )
    lines = [
        _multiline("Peak allocated by phase (GiB)", [_PEAK.format(phase.value) for phase in Phase]),
        _multiline(
            "Allocated, reserved, capacity (GiB)",
            [*(_PEAK.format(phase.value) for phase in Phase), *_DEVICE_LINES],
        ),
        _multiline("Prediction error (%)", ["memory/prediction_error_pct"]),
        _multiline("Capacity used (%)", ["memory/capacity_used_pct"]),
    ]
    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="Memory: measured peaks "
                + ("in the predicted band" if has_band else "beside the predicted ones"),
                chart=of_phases,
            ),
            layout_pb2.Category(title="Memory: over the training", chart=lines),
            *(
                [layout_pb2.Category(title="Memory: over the ranks", chart=_of_ranks(rank_bands))]
                if rank_bands
                else []
            ),
        ]
    )
    # Not SummaryWriter.add_custom_scalars: TensorBoard reads one layout a run, and the user may
    # have one.
    summary = Summary.Value(
        tag="custom_scalars__config__",
        metadata=SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name="custom_scalars")
        ),
        tensor=TensorProto(
            dtype="DT_STRING",
            string_val=[layout.SerializeToString()],
            tensor_shape=TensorShapeProto(),
        ),
    )
    writer = FileWriter(inside(log_dir, LAYOUT_RUN))
    writer.add_summary(Summary(value=[summary]))
    writer.close()


_DEVICE_LINES = [
    "memory/peak_reserved_gib",
    _PREDICTED_RESERVED,
    "memory/peak_resident_gib",
    "memory/capacity_gib",
]


def _of_ranks(kinds: Sequence[str]) -> list[Any]:
    bands = [
        _margin(
            f"Peak {kind}: mean between the smallest and the largest (GiB)",
            *(_OF_RANKS.format(kind, which) for which in ("mean", "min", "max")),
        )
        for kind in reversed(kinds)
    ]
    phases = [
        _multiline(
            f"Worst rank, {phase.label}: peak, measured and predicted (GiB)",
            [tag.format(phase.value) for tag in (_WORST_PREDICTED, _WORST_PEAK)],
        )
        for phase in Phase
    ]
    shares = [
        _multiline("Worst rank: peak of its capacity (%)", [_WORST_SHARE]),
        _multiline("Which rank is the worst", [_WORST_RANK]),
    ]
    return [*bands, *phases, *shares]


def _in_band(phase: Phase) -> Any:
    tags = (_PEAK.format(phase.value), _LOW.format(phase.value), _PREDICTED.format(phase.value))
    return _margin(f"{phase.label}: peak in the predicted band (GiB)", *tags)


def _margin(title: str, value: str, lower: str, upper: str) -> Any:
    from tensorboard.plugins.custom_scalar import layout_pb2

    band = layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
    return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[band]))


def _pair(phase: Phase) -> Any:
    return _multiline(
        f"{phase.label}: peak, measured and predicted (GiB)",
        [_PREDICTED.format(phase.value), _PEAK.format(phase.value)],
    )


def _multiline(title: str, tags: list[str]) -> Any:
    from tensorboard.plugins.custom_scalar import layout_pb2

    # TensorBoard matches tags as regular expressions at the beginning of a name.
    return layout_pb2.Chart(
        title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"{tag}$" for tag in tags])
    )


def write_scalars(writer: SummaryWriter, points: Mapping[str, float], step: int) -> None:
    """Write one value for each tag into a run, all in one event, unlike add_scalar."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
    writer._get_file_writer().add_summary(Summary(value=values), step)
