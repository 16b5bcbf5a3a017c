"""Runs compiled functions as PyTorch's CUDA graph trees do (torch/_inductor/cudagraph_trees.py).

All graphs share a private pool of the allocator. The first call of a function *warms up*: it runs
as it is, in the pool. The second one *records*: inputs whose addresses change from call to call are
copied into the pool, the allocator's cache is emptied, and the function runs in the pool. Later
calls *replay*: nothing is allocated. Then the pool's segments stay reserved, and tensors in it do
not count as allocated: here they have 0 bytes.

The calls from the first forward pass to the last backward pass are a path in a tree. A tensor that
a function on the path returned keeps its address, so that the next function need not copy it. As a
new step begins, the tensors that are left of the path before are freed, whoever holds them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module
from typing import Any

import torch

from memcallback.core.allocation_trace import GRAPH_POOL, GRAPH_STREAM
from memcallback.core.types import Category
from memcallback.trace.dispatch.entries import Entry
from memcallback.trace.dispatch.mode import TraceMode
from memcallback.trace.patches.generated_code import empty_strided
from memcallback.trace.patches.patching import patched

#: The seed and the offset of each generator of random numbers, which all graphs share
#: (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp).
_SEED_BYTES = 8
#: Warming up, recording, and a replay that frees what the recording left.
_NUM_CALLS_TO_SETTLE = 3
_OPERATOR = "a CUDA graph"
_OUT_OF_ORDER = (
    "A compiled function warmed up or was recorded while CUDA graphs of other functions in the "
    "step were already replayed. The prediction assumes that this function reuses the memory of "
    "those graphs, so predicted reserved memory can be too low."
)
_OVERWRITTEN = (
    "{} uses a tensor that a CUDA graph returned in an earlier forward or backward pass. PyTorch "
    "refuses that with an error, as the graph has overwritten it: the training would stop there. "
    "It happens if gradients of several batches are added up, an output is kept for the next step, "
    "or the optimizer has CUDA graphs too. Compile without them, or clone the tensor."
)
_REPLACED = (
    "A CUDA graph reads a tensor that was created again after the graph was recorded. The new "
    "tensor is assumed to have the address of the old one. If it has another, PyTorch records the "
    "graph again, and meanwhile allocates as much as a recording does."
)
_MUTATES = (
    "A compiled function that writes to its inputs runs without a CUDA graph, as on the card."
)


class _Kind(Enum):
    FORWARD = auto()
    BACKWARD = auto()
    INFERENCE = auto()


class _State(Enum):
    """What the last call on the path did."""

    WARM_UP = auto()
    RECORDING = auto()
    REPLAY = auto()


@dataclass(eq=False)
class _Function:
    """A compiled function, with inputs of certain sizes.

    Attributes:
        model: The generated code, which empties the list of its inputs.
        static: Which inputs keep their addresses: parameters, and what was saved for the backward
            pass.
        mutated: Which inputs it writes to.
        kind: Whether it is a forward pass, its backward pass, or a forward pass without one.
    """

    model: Callable[[list[Any]], Any]
    static: frozenset[int]
    mutated: frozenset[int]
    kind: _Kind


@dataclass(eq=False)
class _Recording:
    """The recording of a function, and those that came after it.

    Attributes:
        function: What was recorded.
        places: The inputs that are not copied, and their places on the path; None for others.
        static: The allocations of those that are not on the path.
        after: The recordings that came after it.
        num_flops: Its floating-point operations.
    """

    function: _Function
    places: dict[int, tuple[int, int] | None]
    static: dict[int, Entry | None]
    after: list[_Recording] = field(default_factory=list)
    num_flops: int = 0


class GraphTree:
    """The CUDA graphs of one trace.

    Attributes:
        is_open: Whether a function runs in a graph.
        num_compiled: Functions that Inductor got to compile, with a CUDA graph or without.
    """

    def __init__(self, mode: TraceMode, is_in_whole_update: Callable[[], bool]) -> None:
        self.num_compiled = 0
        self._mode = mode
        #: Whether a function of the whole update is compiled. Then an update is one path in the
        #: tree, however many compiled functions it is in the trace.
        self._is_in_whole_update = is_in_whole_update
        self.is_open = False
        self._roots: list[_Recording] = []
        self._warm: set[_Function] = set()
        #: Of each call on the path, what it returned in the pool.
        self._path: list[list[Entry]] = []
        self._state = _State.WARM_UP
        #: The recording of the last call on the path.
        self._last: _Recording | None = None
        self._generation = -1
        self._has_pending_backward = False
        #: Generators of random numbers, other than the card's own, that graphs draw from.
        self._generators: list[torch.Generator] = []
        #: What was freed while somebody still held it.
        self._overwritten: set[Entry] = set()
        #: Whether a training would fail because of that.
        self._is_failing = False

    def graphed(
        self,
        model: Callable[[list[Any]], Any],
        static_input_idxs: Sequence[int] = (),
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        mutated_input_idxs: Sequence[int] = (),
        **_: Any,
    ) -> Callable[[list[Any]], Any]:
        """The function that runs in place of generated code (`cudagraphify`)."""
        kind = _Kind.BACKWARD if is_backward else _Kind.FORWARD
        # A graph of its own for each combination of sizes that are not known at compile time.
        functions: dict[tuple[int, ...], _Function] = {}

        def run(inputs: list[Any]) -> Any:
            sizes = tuple(int(one) for one in inputs if isinstance(one, (int, torch.SymInt)))
            function = functions.get(sizes)
            if function is None:
                function = functions[sizes] = _Function(
                    model,
                    frozenset(static_input_idxs),
                    frozenset(mutated_input_idxs),
                    _Kind.INFERENCE if is_inference else kind,
                )
            outputs = self._run(function, inputs)
            if function.kind is not _Kind.INFERENCE:
                self._has_pending_backward = function.kind is _Kind.FORWARD
            return outputs

        return run

    def set_to_running_backward(self) -> None:
        """A backward pass runs that has no graph."""
        self._has_pending_backward = False

    def _run(self, function: _Function, inputs: list[Any]) -> Any:
        self._open()
        if self._path and self._state is not _State.REPLAY:
            self._end_path()
        if not self._is_failing:
            self._note_overwritten(_OPERATOR, inputs)
        if self._mutates(function, inputs):
            self._mode.assumed[_MUTATES] = None
            return function.model(inputs)
        if function not in self._warm or (self._path and self._state is _State.WARM_UP):
            self._note_out_of_order()
            return self._warm_up(function, inputs)
        if not self._path or self._state is _State.REPLAY:
            recorded = self._recorded(function, inputs)
            if recorded is not None:
                return self._replay(recorded, inputs)
            if self._path:
                self._end_path()
                if not self._path:
                    return self._run(function, inputs)
                self._note_out_of_order()
        return self._record(function, inputs)

    def _note_out_of_order(self) -> None:
        """Say that memory of what was replayed was left out, where some of it is still in use."""
        if self._state is _State.REPLAY and any(self._live()):
            self._mode.assumed[_OUT_OF_ORDER] = None

    def _open(self) -> None:
        """Make the tree as it is first used."""
        if self.is_open:
            return
        self.is_open = True
        mode, ledger = self._mode, self._mode.ledger
        settled = mode.num_windows + _NUM_CALLS_TO_SETTLE
        mode.num_windows_to_settle = max(mode.num_windows_to_settle, settled)
        ledger.empty_cache()
        with self._on_stream(GRAPH_STREAM):
            self._make_seeds()

    def _make_seeds(self) -> None:
        for _ in range(2):
            self._mode.ledger.alloc(_SEED_BYTES, Category.WORKSPACE, _OPERATOR)

    def _end_path(self) -> None:
        """End the path if a new step begins, or if all that it returned is gone."""
        live = list(self._live())
        is_new = self._generation != self._current_generation() and not self._has_pending_backward
        if not is_new and live:
            return
        if self._state is not _State.REPLAY:
            for entry in live:
                self._mode.ledger.free(entry)
            if live and not self._is_failing:
                self._overwritten.update(live)
                self._mode.check_inputs = self._note_overwritten
        self._path, self._last = [], None

    def _note_overwritten(self, operator: str, tensors: Sequence[object]) -> None:
        """Say, once, that PyTorch raises an error where something that was freed is used."""
        if any(self._entry(tensor) in self._overwritten for tensor in tensors):
            self._mode.assumed[_OVERWRITTEN.format(operator)] = None
            self._is_failing = True
            self._mode.check_inputs = None

    def _live(self) -> Iterator[Entry]:
        """What functions on the path returned and somebody still holds."""
        return (entry for entries in self._path for entry in entries if not entry.is_freed)

    def _warm_up(self, function: _Function, inputs: list[Any]) -> Any:
        """Run a function as it is, in the pool."""
        self._warm.add(function)
        with self._in_pool():
            outputs = function.model(inputs)
        self._enter(None, outputs, _State.WARM_UP)
        return outputs

    def _record(self, function: _Function, inputs: list[Any]) -> Any:
        """Run a function in the pool, with copies of the inputs that are not static."""
        places = self._places(function, inputs)
        recording = _Recording(function, places, self._static(places, inputs))
        siblings = self._roots if self._last is None else self._last.after
        siblings.append(recording)
        with self._on_stream(GRAPH_POOL):
            copies = self._copied(inputs, places)
        for value in inputs:
            if isinstance(value, torch.Generator) and value not in self._generators:
                self._generators.append(value)
                self._make_seeds()
        inputs.clear()
        self._mode.kernels.close_handles(self._mode.ledger)
        self._mode.ledger.empty_cache()
        num_flops = self._mode.num_flops
        self._mode.is_capturing = True
        try:
            with self._in_pool():
                outputs = function.model(copies)
        finally:
            self._mode.is_capturing = False
        recording.num_flops = self._mode.num_flops - num_flops
        self._enter(recording, outputs, _State.RECORDING)
        return outputs

    def _replay(self, recording: _Recording, inputs: list[Any]) -> Any:
        """Return what a function returns, which lies in the pool already."""
        mode, ledger = self._mode, self._mode.ledger
        mode.num_flops += recording.num_flops
        if self._static(recording.places, inputs) != recording.static:
            mode.assumed[_REPLACED] = None
        with mode.unrecorded():
            copies = self._copied(inputs, recording.places)
            inputs.clear()
            outputs = recording.function.model(copies)
            with self._on_stream(GRAPH_POOL):
                for output in outputs:
                    if isinstance(output, torch.Tensor) and ledger.find(output) is None:
                        ledger.add(output, None, _OPERATOR, size_bytes=0)
        self._enter(recording, outputs, _State.REPLAY)
        return outputs

    def _enter(self, recording: _Recording | None, outputs: Sequence[Any], state: _State) -> None:
        """Go one call further on the path."""
        self._state, self._last = state, recording
        self._generation = self._current_generation()
        entries = map(self._entry, outputs)
        self._path.append(
            [entry for entry in entries if entry is not None and entry.stream == GRAPH_POOL]
        )

    def _recorded(self, function: _Function, inputs: Sequence[Any]) -> _Recording | None:
        """The recording that can be replayed for such inputs (`check_invariants`)."""
        candidates = self._roots if self._last is None else self._last.after
        places = self._places(function, inputs)
        return next(
            (one for one in candidates if one.function is function and one.places == places), None
        )

    def _places(
        self, function: _Function, inputs: Sequence[Any]
    ) -> dict[int, tuple[int, int] | None]:
        """The inputs that are not copied, and where on the path they come from; None elsewhere."""
        on_path = {
            entry: (depth, number)
            for depth, entries in enumerate(self._path)
            for number, entry in enumerate(entries)
        }
        places: dict[int, tuple[int, int] | None] = {}
        for number, value in enumerate(inputs):
            entry = self._entry(value)
            if entry is not None and entry in on_path:
                places[number] = on_path[entry]
            elif number in function.static or entry is None or entry.is_host:
                places[number] = None
        return places

    def _static(
        self, places: dict[int, tuple[int, int] | None], inputs: Sequence[Any]
    ) -> dict[int, Entry | None]:
        """The allocations of inputs that are not on the path and not copied."""
        return {
            number: self._entry(inputs[number]) for number, place in places.items() if place is None
        }

    def _mutates(self, function: _Function, inputs: Sequence[Any]) -> bool:
        """Whether a function writes to an input that would be copied (`check_for_mutation`)."""
        places = self._places(function, inputs) if function.mutated else {}
        return any(number not in places for number in function.mutated)

    def _copied(self, inputs: Sequence[Any], places: dict[int, Any]) -> list[Any]:
        """The inputs, with copies of those that may be elsewhere the next time."""
        make = empty_strided(self._mode, "device")
        return [
            value if number in places else make(value.size(), value.stride(), value.dtype)
            for number, value in enumerate(inputs)
        ]

    def _entry(self, value: object) -> Entry | None:
        return self._mode.ledger.find(value) if isinstance(value, torch.Tensor) else None

    @contextmanager
    def _in_pool(self) -> Iterator[None]:
        """Allocate in the pool inside; workspaces of cuBLAS are freed before and after."""
        self._mode.kernels.close_handles(self._mode.ledger)
        with self._on_stream(GRAPH_POOL):
            yield
        self._mode.kernels.close_handles(self._mode.ledger)

    @contextmanager
    def _on_stream(self, stream: int) -> Iterator[None]:
        mode = self._mode
        before = mode.ledger.stream, mode.follow_streams
        mode.ledger.stream, mode.follow_streams = stream, None
        try:
            yield
        finally:
            mode.ledger.stream, mode.follow_streams = before

    def _current_generation(self) -> int:
        """A number that changes as a compiled function is called, or as the user says."""
        if self._is_in_whole_update():
            return int(trees().MarkStepBox.mark_step_counter) or self._mode.num_windows
        return int(trees().CUDAGraphTreeManager.get_curr_generation())


def trees() -> Any:
    """PyTorch's module of CUDA graph trees, imported as its build needs."""
    name = "torch._inductor.cudagraph_trees"
    if name not in sys.modules:
        # A trace says that every build is one for CUDA.
        is_built = torch.version.cuda is not None
        with patched([(torch.backends.cuda, "is_built", lambda: is_built)]):
            import_module(name)
    return sys.modules[name]
