"""TraceMode: the fake tensor mode that records what each operator allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memcallback.core.tensors import dense_parts, is_wrapper, new_ragged_size, sparse_tensor
from memcallback.core.torch_private import (
    BelowAutograd,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    current_autograd_node,
    no_dispatch,
    sequence_nr,
    tree_map_only,
)
from memcallback.core.types import Phase
from memcallback.cuda.decompositions.ctc import ctc_forward
from memcallback.cuda.decompositions.packed_sequences import pack_padded
from memcallback.cuda.decompositions.registry import decomposition_of
from memcallback.cuda.op_call import OpCall
from memcallback.cuda.rules import corrected_result, result_without_fake
from memcallback.devices.catalogue import DeviceSpec
from memcallback.trace.dispatch.collectives import WAIT, InFlight, is_collective, with_result
from memcallback.trace.dispatch.gradients import Gradients
from memcallback.trace.dispatch.in_place import InPlace
from memcallback.trace.dispatch.kernel_writer import KernelWriter
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.operand_types import check_operands
from memcallback.trace.dispatch.output_cache import OutputCache
from memcallback.trace.dispatch.placeholders import (
    SILENT,
    Bounds,
    Placeholders,
    is_known_to_hold,
)
from memcallback.trace.dispatch.placement import MIXED, Placement
from memcallback.trace.dispatch.real_tensors import RealTensors, is_of_numbers
from memcallback.trace.dispatch.replayed_views import ReplayedViews
from memcallback.trace.dispatch.values import KnownValues
from memcallback.trace.dispatch.work import num_flops, sent_bytes

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READ = _aten._local_scalar_dense.default
#: Operators that take real tensors: those that make a fake of one, and the one that reads a value.
_TAKES_REAL = frozenset(
    {_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default, _READ}
)
#: Operators that make tensors of numbers from nothing. Values of integer tensors are kept up to
#: this many elements.
_NUMBERS = frozenset(
    {
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        *(getattr(_aten.arange, name) for name in ("default", "start", "start_step")),
    }
)
_MAX_KEPT_NUMBERS = 65_536
CUDA = torch.device("cuda", 0)
_OUTPUTS = OutputCache()


class TraceMode(FakeTensorMode):
    """A fake tensor mode with tensors on a CUDA device and the host, or all on a CPU.

    For C++ all of them are CPU tensors, since a PyTorch without CUDA knows no other device. Python
    code that asks gets `cuda:0` for those on the device (`CudaFunctions` in
    trace/patches/cuda.py).

    Attributes:
        ledger: The allocations so far.
        spec: The card; None to train on a CPU, where all memory is recorded.
        placement: Where tensors are, and which device Python code sees.
        assumed: The assumptions made for values that fakes do not have, one sentence each.
        is_recording: Whether operators are recorded.
        operator: The name of the last operator.
        num_flops: Floating-point operations of the recorded operators, by PyTorch's own formulas
            (torch.utils.flop_counter).
        sent_bytes: What the rank sent in the recorded operators.
        values: The values of tensors, where they are known.
        placeholders: What is taken for values that are unknown.
        kernels: What writes into the ledger what CUDA operators allocate.
        in_flight: The tensors that collectives keep alive.
        modules: The module in whose forward pass the autograd node of a number was made; None
            where nobody asks.
        follow_streams: Makes the stream current in which the running autograd node was made; None
            with a single stream.
        accumulated_in: By id of parameter, the stream in which its gradients are accumulated, where
            that is known.
        num_windows: Windows (updates, batches) that have run.
        num_windows_to_settle: Windows after which all later ones are alike.
        is_capturing: Whether a CUDA graph is recorded.
        check_inputs: Called with the name and the inputs of each operator that is no view; None
            where nobody asks.
        keeps_numbers: Whether C++ code is running that reads the numbers which it writes into
            tensors.
    """

    def __init__(
        self, ledger: Ledger, spec: DeviceSpec | None, bounds: Bounds | None = None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ledger = ledger
        self.spec = spec
        self.placement = Placement(self, lambda tensor: self.ledger.find(tensor))
        self.assumed: dict[str, None] = {}
        self.is_recording = False
        self.operator = ""
        self.num_flops = self.sent_bytes = 0
        self.modules: Callable[[int], str] | None = None
        self.follow_streams: Callable[[], None] | None = None
        self.accumulated_in: dict[int, int] = {}
        self.keeps_numbers = False
        self.in_flight = InFlight()
        self.values = KnownValues()
        self.placeholders = Placeholders(self.values, bounds or Bounds(), self.assumed)
        self._is_inside = False
        self._is_in_wrapper = False
        self._is_passed_on = False
        self.kernels = KernelWriter(self.placement, self.assumed)
        self.num_windows, self.num_windows_to_settle = 0, 1
        self.is_capturing = False
        self.check_inputs: Callable[[str, Sequence[object]], None] | None = None
        self.real_tensors = RealTensors(self, self.in_flight)
        self._in_place = InPlace(lambda tensor: self.ledger.find(tensor))
        self._replayed_views = ReplayedViews(self._in_place)
        self._gradients = Gradients(is_cuda=spec is not None, assumed=self.assumed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to disable compilation in each dispatch, which takes longer than most of them."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on shapes, and record it if it is not a part of another."""
        if func is _DEVICE:
            return args[0].fake_device  # type: ignore[attr-defined]
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            if self._is_passed_on:
                self._is_passed_on = False
                return NotImplemented
            return self._by_wrapper(func, args, kwargs)
        if self.keeps_numbers and is_of_numbers(args, kwargs):
            ledger = self.ledger if self.is_recording else None
            return self.real_tensors.run(OpCall(func, args, kwargs, self.spec), ledger)
        if self._is_inside or not self.is_recording:
            return self.dispatch(func, types, args, kwargs)
        placement = self.placement
        reported = placement.reports_cuda_device
        placement.reports_cuda_device, self._is_inside = False, True
        try:
            with DisableTorchFunction():
                call = OpCall(func, args, kwargs, self.spec)
                if func not in _TAKES_REAL and not all(
                    isinstance(tensor, FakeTensor) for tensor in call.inputs
                ):
                    fake_of = partial(self.real_tensors.fake_of, self.ledger)
                    args, kwargs = tree_map_only(torch.Tensor, fake_of, (args, kwargs))
                    call = OpCall(func, args, kwargs, self.spec)
                decomposition = self._decomposition(call)
                if decomposition is None:
                    return self._record(call, types)
                return self._run_decomposition(decomposition, call)
        finally:
            placement.reports_cuda_device, self._is_inside = reported, False

    def _decomposition(self, call: OpCall) -> Callable[..., Any] | None:
        """What runs instead of a composite operator; None for a primitive one."""
        check_operands(call)
        if call.op is _aten._pack_padded_sequence.default:
            return self._packed(call)
        if call.operator == "aten::_ctc_loss":
            return partial(
                ctc_forward,
                known=self.values.get,
                assumed=self.assumed,
                is_cuda=self.spec is not None,
            )
        node = self._node()
        return (
            self._replayed_views.instead(call, node, self.ledger)
            or self._gradients.instead(call, node, self._silently)
            or decomposition_of(call, is_wrapped=self._is_in_wrapper)
        )

    def _packed(self, call: OpCall) -> Callable[..., Any]:
        """What packs sequences: of unknown lengths, or of those in the batch."""
        lengths: Any = call.args[1]
        if lengths.constant is None:
            self.placeholders.open_shapes.append(call.operator)
        values = self.values.get(lengths) if self.values.decide_shapes else None
        return partial(
            pack_padded, values=values, assumed=self.assumed, on_host=self.placement.on_host
        )

    def _silently(self, op: Any, *args: Any, **kwargs: Any) -> object:
        """Run an operator without recording it."""
        with self.unrecorded():
            return op(*args, **kwargs)

    def _run_decomposition(self, decomposition: Callable[..., Any], call: OpCall) -> object:
        """Run a decomposition and record its operators."""
        reused = self._reused(call, self._node())
        self._is_inside = False
        with self:
            if reused is None:
                return decomposition(*call.args, **call.kwargs)
            if reused.layout is torch.strided:
                return reused.add_(call.args[1])
            indices, values = dense_parts(reused)
            return sparse_tensor(indices, values, reused.shape, is_coalesced=reused.is_coalesced())

    def _by_wrapper(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Let a wrapper (nested tensor, DTensor) decompose the operator.

        Its code must see the fakes' own device.

        It does so below autograd, where composite operators arrive whole.
        """
        placement = self.placement
        before = placement.reports_cuda_device, self._is_in_wrapper
        placement.reports_cuda_device, self._is_in_wrapper = False, True
        try:
            # A detach by which autograd makes a view comes from above autograd, and with PyTorch
            # 2.6 makes one by a detach again.
            with (
                self,
                DisableTorchFunction(),
                BelowAutograd(),
            ):
                # PyTorch asks this mode again, which passes it on to the tensor.
                self._is_passed_on = True
                return func(*args, **kwargs)
        finally:
            placement.reports_cuda_device, self._is_in_wrapper = before
            self._is_passed_on = False

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether to keep a tensor's values.

        Those of a number, as in PyTorch, and here of integer tensors that Python code writes
        (lengths).
        """
        is_list = (
            not t.is_floating_point()
            and not t.is_complex()
            and t.layout is torch.strided
            and t.numel() <= _MAX_KEPT_NUMBERS
        )
        return super().may_turn_const(t) or (is_list and t.device.type == "cpu")

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """The ragged size of a nested tensor that is made in the step."""
        return new_ragged_size()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing inside, and let tensors report the fakes' own device."""
        placement = self.placement
        before = self.is_recording, placement.reports_cuda_device
        self.is_recording, placement.reports_cuda_device = False, False
        try:
            yield
        finally:
            self.is_recording, placement.reports_cuda_device = before

    @contextmanager
    def recorded_on_device(self) -> Iterator[None]:
        """Record what runs inside `unrecorded`, with all new tensors on the device."""
        placement = self.placement
        before = self.is_recording, placement.reports_cuda_device, placement.target
        self.is_recording, placement.reports_cuda_device, placement.target = True, False, "device"
        try:
            with self:
                yield
        finally:
            self.is_recording, placement.reports_cuda_device, placement.target = before

    def _node(self) -> Any:
        """The running autograd node, None for none."""
        if self.ledger.phase is Phase.OPTIMIZER_STEP:
            return None
        return current_autograd_node()

    def _reused(self, call: OpCall, node: Any) -> torch.Tensor | None:
        if node is None or torch.is_grad_enabled():
            return None
        return self._in_place.reused(call.op, call.args, node)

    def _record(self, call: OpCall, types: Sequence[type]) -> object:
        """Run a primitive operator on fakes and record what it allocates."""
        name = self.operator = call.operator
        node, number = self._node(), -1
        if node is not None:
            number = sequence_nr(node)
            if self.modules is not None:
                self.ledger.module = self.modules(number)
            if self.follow_streams is not None:
                self.follow_streams()
        if self.check_inputs is not None and not call.op.is_view:
            self.check_inputs(name, call.inputs)
        reused = self._reused(call, node)
        if name == WAIT:
            return call.args[0]
        if self.spec is not None and self.placement.is_mixed_product(call):
            self.assumed[MIXED.format(name)] = None
        try:
            call = call.returning(self._result(call, types))
        except DataDependentOutputException:
            return self.placeholders.value(call, self.ledger)
        except DynamicOutputShapeException:
            call = call.returning(self.placeholders.result(call))
        self.num_flops += num_flops(call)
        self.sent_bytes += sent_bytes(call)
        if reused is not None:
            if self.spec is not None:
                self.kernels.record_in_place(self.ledger, call, reused, number)
            self.ledger.move(reused, call.result)
            self.values.overwrite(reused)
            return call.result
        if self.spec is None:
            for tensor in call.outputs:
                if self.ledger.find(tensor) is None:
                    self.ledger.add(tensor, None, name).node = number
        else:
            corrected = corrected_result(call)
            call = call if corrected is None else call.returning(corrected)
            self.kernels.record(self.ledger, call, number)
        self.values.follow(call, is_host=self._is_on_host(call))
        self._replayed_views.follow(call)
        if (holds := is_known_to_hold(call, self.ledger.find)) is not None:
            for tensor in call.outputs:
                if (entry := self.ledger.find(tensor)) is not None:
                    entry.is_truth = holds
        return call.result

    def _result(self, call: OpCall, types: Sequence[type]) -> Any:
        """The result on fakes, with the values of small integer tensors."""
        func = call.op
        if func is _READ and isinstance(call.args[0], FakeTensor) and call.args[0].constant is None:
            raise DataDependentOutputException(func)
        if func in SILENT:
            raise DynamicOutputShapeException(func)
        result = result_without_fake(call)
        if result is None:
            run = partial(self.dispatch, call.op, types, call.args, call.kwargs)
            result = _OUTPUTS.result(self, call, run)
        if is_collective(call.operator):
            self.in_flight.begun(call.args[0])
            result = with_result(result)
        if func in _NUMBERS and self.may_turn_const(result):
            with no_dispatch():
                result = func(*call.args, **{**call.kwargs, "device": torch.device("cpu")})
            result = self.fake_tensor_converter.from_real_tensor(self, result, make_constant=True)
        return result

    def _is_on_host(self, call: OpCall) -> bool:
        """Whether the host computes the result of a call."""
        if self.spec is None:
            return True
        entry = self.ledger.find(call.outputs[0]) if call.outputs else None
        return entry is not None and entry.is_host

    def calibrate(self, *, is_threaded: bool) -> None:
        """Count the references to gradients that certainly nobody else holds."""
        assert not self.is_recording
        is_on = torch.is_anomaly_enabled()
        with (
            self,
            torch.enable_grad(),
            # Its search for NaN does not run on sparse fakes.
            torch.autograd.set_detect_anomaly(is_on, check_nan=False),
        ):
            self.is_recording = True
            self._in_place.calibrate((is_on, is_threaded, self.spec is None))
            self.is_recording = False
        self.ledger = Ledger()
