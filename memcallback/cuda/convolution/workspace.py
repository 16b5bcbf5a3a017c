"""The workspace of a convolution: cuDNN's own answer, or an estimate."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias, TypeVar

from memcallback.core.answers import answer
from memcallback.cuda.convolution import cudnn
from memcallback.cuda.convolution.call import ITEM_BYTES, Convolution, Direction, Layout
from memcallback.cuda.convolution.cudnn import Attribute, CuDNN, CuDNNError, Kind, Type
from memcallback.cuda.convolution.needs_device import workspace_that_needs_device_bytes
from memcallback.cuda.convolution.stream_k import has_rule, workspace_on_device_bytes
from memcallback.devices.catalogue import DeviceSpec

_Answer = TypeVar("_Answer")
#: A convolution, the shape of its input, a card, and how PyTorch asks cuDNN.
_Problem: TypeAlias = tuple[Convolution, tuple[int, ...], DeviceSpec, int]


def workspace_or_estimate_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int:
    """The bytes by a rule or cuDNN; where cuDNN cannot answer, by a rule or the estimate."""
    size_bytes = workspace_bytes(convolution, input_shape, device)
    if size_bytes is None:
        size_bytes = workspace_that_needs_device_bytes(convolution, input_shape, device)
    if size_bytes is None:
        size_bytes = estimated_workspace_bytes(convolution, input_shape, device)
    return size_bytes


def estimated_workspace_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int:
    """Estimate the workspace without cuDNN.

    Kernels on tensor cores need channels last and copy all other tensors; kernels without tensor
    cores copy those in channels last. A weight gradient may be summed in float32, twice. The
    estimate is no upper bound: of the 1,969 answers of cuDNN 9.19 in tests/recorded/convolutions
    (H200, A100 and T4, three dtypes, both layouts) 84 % are at most 1 MiB above it, 99 % at most
    25 MiB, the worst 128 MiB. All estimates together are 1.18 times the answers.
    """
    capability = device.compute_capability
    is_float32 = convolution.dtype == "float32"
    on_tensor_cores = convolution.dtype != "float64" and capability >= (
        (8, 0) if is_float32 else (7, 5)
    )
    if is_float32 and not convolution.allow_tf32:
        on_tensor_cores = False
    num_weights = prod(convolution.weight_shape)
    num_elements = prod(input_shape) + prod(convolution.output_shape(input_shape)) + num_weights
    copies_bytes = num_elements * ITEM_BYTES[convolution.dtype]
    if convolution.channels_last:
        reads_as_is = on_tensor_cores and (not is_float32 or capability >= (9, 0))
        return 8 * num_weights if reads_as_is else copies_bytes
    if not on_tensor_cores:
        return 0
    return copies_bytes + (
        8 * num_weights if convolution.direction is Direction.BACKWARD_FILTER else 0
    )


# The values of cudnn_graph.h.
_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_CROSS_CORRELATION = 1
_MODE_INSTANT, _MODE_B, _MODE_FALLBACK = 0, 1, 2
_NOTE_TENSOR_CORE, _NOTE_DOWN_CONVERT_INPUTS, _NOTE_NONDETERMINISTIC, _NUM_NOTES = 0, 1, 4, 10
_COMPILED_WHEN_PLANNED = 0
#: More than a plan has; cuDNN does not say how many.
_NUM_KNOBS = 20
#: The caching allocator aligns to 512 bytes, but Conv_v8.cpp promises cuDNN only 32.
_ALIGNMENT = 32


#: Direction -> cuDNN's numbers of the attributes alpha, beta, convolution, w, x, y.
_OPERATION = {
    Direction.FORWARD: (700, 701, 702, 703, 704, 705),
    Direction.BACKWARD_DATA: (706, 707, 708, 709, 710, 711),
    Direction.BACKWARD_FILTER: (712, 713, 714, 715, 716, 717),
}


def workspace_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> int | None:
    """The bytes of the plan that PyTorch takes, by a rule or cuDNN; None if cuDNN cannot answer."""
    return _answer(_workspace_bytes, (convolution, tuple(input_shape), device, _mode()))


def all_workspaces_bytes(
    convolution: Convolution, input_shape: Sequence[int], device: DeviceSpec
) -> tuple[int, ...]:
    """The workspaces of all plans, in the order in which PyTorch tries them where one fails.

    A plan fails if its workspace does not fit (`try_configs` in Conv_v8.cpp). Empty if cuDNN cannot
    answer.
    """
    return _answer(_all_workspaces_bytes, (convolution, tuple(input_shape), device, _mode()))


def _answer(ask: Callable[..., _Answer], problem: _Problem) -> _Answer:
    """Take the known answer or ask. Without cuDNN nothing is asked, so no process is needed."""
    finds_device = cudnn.finds_device()
    if not cudnn.is_available():
        return ask(*problem, finds_device=finds_device)
    return answer((ask.__name__, problem), lambda: ask(*problem, finds_device=finds_device))


def _mode() -> int:
    mode_b = os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1"
    return _MODE_B if mode_b else _MODE_INSTANT


@lru_cache(maxsize=65536)
def _workspace_bytes(
    convolution: Convolution,
    input_shape: tuple[int, ...],
    device: DeviceSpec,
    mode: int,
    *,
    finds_device: bool,
) -> int | None:
    plans = _plans(convolution, input_shape, device, mode, finds_device=finds_device)
    with suppress(CuDNNError), closing(plans):
        return next(plans, None)
    return None


@lru_cache(maxsize=4096)
def _all_workspaces_bytes(
    convolution: Convolution,
    input_shape: tuple[int, ...],
    device: DeviceSpec,
    mode: int,
    *,
    finds_device: bool,
) -> tuple[int, ...]:
    with suppress(CuDNNError):
        return tuple(_plans(convolution, input_shape, device, mode, finds_device=finds_device))
    return ()


def _plans(
    convolution: Convolution,
    input_shape: tuple[int, ...],
    device: DeviceSpec,
    mode: int,
    *,
    finds_device: bool,
) -> Generator[int]:
    """The workspace of each plan that the device can run, in the order in which PyTorch tries."""
    library = cudnn.load()
    if library is None:
        return
    with ExitStack() as stack:
        stack.enter_context(cudnn.device_hidden())
        query = _Query(library, stack, library.device(device))
        graph = query.graph(convolution, input_shape)
        if not finds_device and mode == _MODE_INSTANT:  # in mode B nothing was recorded
            first_bytes = workspace_that_needs_device_bytes(convolution, input_shape, device)
            if first_bytes is not None:
                yield first_bytes
        for heuristics in (mode, _MODE_FALLBACK):
            for config in query.configs(graph, heuristics):
                engine = query.engine(config)
                if _is_filtered(convolution, query.notes(engine)):
                    continue
                size_bytes = (
                    query.config_workspace(config)
                    if query.is_compiled(engine)
                    else query.plan_workspace(config)
                )
                if size_bytes is None:
                    continue
                number = query.number(engine)
                if has_rule(convolution, device, number):
                    size_bytes = workspace_on_device_bytes(
                        convolution, input_shape, device, number, query.knobs(config), size_bytes
                    )
                yield size_bytes


def _is_filtered(convolution: Convolution, notes: Sequence[int]) -> bool:
    """Whether PyTorch skips engines with these notes: `filterEngineConfigs` in Conv_v8.cpp."""
    if convolution.deterministic and _NOTE_NONDETERMINISTIC in notes:
        return True
    if _NOTE_DOWN_CONVERT_INPUTS in notes:
        return True
    return (
        convolution.dtype == "float32" and not convolution.allow_tf32 and _NOTE_TENSOR_CORE in notes
    )


@dataclass(frozen=True)
class _Query:
    """Queries cuDNN about one convolution; leaving the stack destroys its descriptors."""

    library: CuDNN
    stack: ExitStack
    device: int

    def graph(self, convolution: Convolution, input_shape: Sequence[int]) -> int:
        """The graph of one operation: `build_opgraph` in Conv_v8.cpp."""
        alpha, beta, geometry, w, x, y = _OPERATION[convolution.direction]
        number = Type.DOUBLE if convolution.dtype == "float64" else Type.FLOAT
        operation = self._create(convolution.direction.value)
        self.library.set(operation, geometry, Type.DESCRIPTOR, self._geometry(convolution))
        self.library.set(operation, x, Type.DESCRIPTOR, self._tensor("x", input_shape, convolution))
        self.library.set(
            operation,
            y,
            Type.DESCRIPTOR,
            self._tensor("y", convolution.output_shape(input_shape), convolution),
        )
        self.library.set(
            operation, w, Type.DESCRIPTOR, self._tensor("w", convolution.weight_shape, convolution)
        )
        self.library.set(operation, alpha, number, 1.0)
        self.library.set(operation, beta, number, 0.0)
        graph = self._create(Kind.GRAPH)
        self.library.set(
            graph, Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, self.library.finalized(operation)
        )
        return self.library.finalized(graph)

    def configs(self, graph: int, mode: int) -> list[int]:
        """The heuristics' engine configurations, best first."""
        heuristics = self._create(Kind.HEURISTICS)
        self.library.set(heuristics, Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, graph)
        self.library.set(heuristics, Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, mode)
        self._for_device(heuristics, Attribute.HEURISTICS_DEVICE)
        if not self.library.finalize(heuristics):
            return []
        count = self.library.count(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
        configs = [self._create(Kind.ENGINE_CONFIG) for _ in range(count)]
        return self.library.get(
            heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR, count, configs
        )

    def engine(self, config: int) -> int:
        """The engine of a configuration."""
        engine = self._create(Kind.ENGINE)
        self.library.get(config, Attribute.CONFIG_ENGINE, Type.DESCRIPTOR, 1, (engine,))
        return engine

    def number(self, engine: int) -> int:
        """An engine's number among those of its kind of operation."""
        return self.library.get(engine, Attribute.ENGINE_NUMBER, Type.INT64, 1)[0]

    def knobs(self, config: int) -> dict[int, int]:
        """What a configuration chooses: kind of choice -> value."""
        made = [self._create(Kind.KNOB_CHOICE) for _ in range(_NUM_KNOBS)]
        chosen = self.library.get(config, Attribute.CONFIG_KNOBS, Type.DESCRIPTOR, _NUM_KNOBS, made)
        return {
            self.library.get(knob, Attribute.KNOB_TYPE, Type.KNOB, 1)[0]: self.library.get(
                knob, Attribute.KNOB_VALUE, Type.INT64, 1
            )[0]
            for knob in chosen
        }

    def notes(self, engine: int) -> list[int]:
        """An engine's numerical notes."""
        return self.library.get(engine, Attribute.ENGINE_NOTES, Type.NOTE, _NUM_NOTES)

    def is_compiled(self, engine: int) -> bool:
        """Whether cuDNN compiles an engine's kernels when it makes a plan."""
        behavior = self.library.get(engine, Attribute.ENGINE_BEHAVIOR, Type.BEHAVIOR, _NUM_NOTES)
        return _COMPILED_WHEN_PLANNED in behavior

    def config_workspace(self, config: int) -> int | None:
        """The workspace of a configuration, without a plan; None if the device cannot run it.

        Compiling takes a third of a second for each convolution and batch size, and shows nothing
        new: with cuDNN 9.19, all 1,969 configurations of tests/recorded/convolutions (H200, A100,
        T4), 120 of them compiled, could be planned and took this workspace. A size beyond what
        cuDNN counts comes back negative: such a configuration cannot be planned.
        """
        size_bytes = self.library.get(config, Attribute.CONFIG_WORKSPACE, Type.INT64, 1)[0]
        return size_bytes if size_bytes >= 0 else None

    def plan_workspace(self, config: int) -> int | None:
        """The workspace of a configuration's plan; None if the device cannot run it."""
        plan = self._create(Kind.PLAN)
        self.library.set(plan, Attribute.PLAN_CONFIG, Type.DESCRIPTOR, config)
        self._for_device(plan, Attribute.PLAN_DEVICE)
        return (
            self.library.get(plan, Attribute.PLAN_WORKSPACE, Type.INT64, 1)[0]
            if self.library.finalize(plan)
            else None
        )

    def _for_device(self, descriptor: int, attribute: Attribute) -> None:
        """Ask for the described device."""
        self.library.set(descriptor, attribute, Type.DESCRIPTOR, self.device)

    def _geometry(self, convolution: Convolution) -> int:
        descriptor = self._create(Kind.CONVOLUTION)
        dtype = "float64" if convolution.dtype == "float64" else "float32"
        self.library.set(descriptor, Attribute.CONVOLUTION_DTYPE, Type.DTYPE, _DTYPES[dtype])
        self.library.set(
            descriptor, Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, _CROSS_CORRELATION
        )
        self.library.set(
            descriptor, Attribute.CONVOLUTION_NUM_DIMENSIONS, Type.INT64, len(convolution.padding)
        )
        self.library.set(
            descriptor, Attribute.CONVOLUTION_PRE_PADDINGS, Type.INT64, *convolution.padding
        )
        self.library.set(
            descriptor, Attribute.CONVOLUTION_POST_PADDINGS, Type.INT64, *convolution.padding
        )
        self.library.set(descriptor, Attribute.CONVOLUTION_STRIDES, Type.INT64, *convolution.stride)
        self.library.set(
            descriptor, Attribute.CONVOLUTION_DILATIONS, Type.INT64, *convolution.dilation
        )
        return self.library.finalized(descriptor)

    def _tensor(self, name: str, shape: Sequence[int], convolution: Convolution) -> int:
        """A dense tensor, with strides as `fixSizeOneDimStride` in Conv_v8.cpp sets them."""
        tensor = self._create(Kind.TENSOR)
        strides = Layout.dense(
            shape, convolution.dtype, channels_last=convolution.channels_last
        ).strides
        self.library.set(tensor, Attribute.TENSOR_DTYPE, Type.DTYPE, _DTYPES[convolution.dtype])
        self.library.set(tensor, Attribute.TENSOR_SHAPE, Type.INT64, *shape)
        self.library.set(tensor, Attribute.TENSOR_STRIDES, Type.INT64, *strides)
        self.library.set(tensor, Attribute.TENSOR_ID, Type.INT64, ord(name))
        self.library.set(tensor, Attribute.TENSOR_ALIGNMENT, Type.INT64, _ALIGNMENT)
        self.library.set(tensor, Attribute.TENSOR_IS_VIRTUAL, Type.BOOLEAN, False)
        return self.library.finalized(tensor)

    def _create(self, kind: int) -> int:
        return self.library.create(kind, self.stack)
