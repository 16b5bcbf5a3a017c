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
from memcallback.core.types import Category, Phase
from memcallback.cuda.decompositions.ctc import ctc_forward
from memcallback.cuda.decompositions.packed_sequences import pack_padded
from memcallback.cuda.decompositions.registry import decomposition_of
from memcallback.cuda.op_call import OpCall, dense_bytes, tensors_of
from memcallback.cuda.rules import corrected_result, result_without_fake
from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.copies.known import remember_values
from memcallback.trace.dispatch.collectives import (
    WAIT,
    InFlight,
    is_collective,
    temporary_bytes,
    with_result,
)
from memcallback.trace.dispatch.gradients import Gradients
from memcallback.trace.dispatch.in_place import IN_PLACE, InPlace
from memcallback.trace.dispatch.kernel_writer import KernelWriter
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.output_cache import OutputCache
from memcallback.trace.dispatch.placeholders import (
    SILENT,
    Bounds,
    NoPlaceholder,
    is_known_to_hold,
    placeholder_result,
    placeholder_value,
)
from memcallback.trace.dispatch.placement import Placement
from memcallback.trace.dispatch.replayed_views import ReplayedViews, copied
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
_LARGEST = "{} has a shape that depends on values: the largest possible was assumed."
_OF_THIS_BATCH = "{} has a shape that depends on values: that of this batch was taken."


_MIXED = (
    "{} takes a matrix on the host and one on the device, which is an error on a CUDA device. The "
    "matrix on the host was not counted. Move it to the device in the step. If your program has it "
    "on the device already when the step begins, name the module that has it: "
    "TrainingStep(..., also=[...])."
)


class TraceMode(FakeTensorMode):
    """A fake tensor mode with tensors on a CUDA device and the host, or all on a CPU.

    For C++ all of them are CPU tensors, since a PyTorch without CUDA knows no other device. Python
    code that asks gets `cuda:0` for those on the device (`CudaFunctions` in
    trace/patches/functions.py).

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
        in_flight: The tensors that collectives keep alive.
        modules: The module in whose forward pass the autograd node of a number was made; None
            where nobody asks.
        follow_streams: Makes the stream current in which the running autograd node was made; None
            with a single stream.
        num_windows: Windows (updates, batches) that have run.
        num_windows_to_settle: Windows after which all later ones are alike.
        is_capturing: Whether a CUDA graph is recorded.
        check_inputs: Called with the name and the inputs of each operator that is no view; None
            where nobody asks.
        open_shapes: The operators for whose results the largest possible shape was taken.
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
        self.open_shapes: list[str] = []
        self.keeps_numbers = False
        self.in_flight = InFlight()
        self.values = KnownValues()
        self.bounds = bounds or Bounds()
        self._is_inside = False
        self._is_in_backward = False
        self._is_in_wrapper = False
        self._is_passed_on = False
        self._kernels = KernelWriter()
        self.num_windows, self.num_windows_to_settle = 0, 1
        self.is_capturing = False
        self.check_inputs: Callable[[str, Sequence[object]], None] | None = None
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_place = InPlace(lambda tensor: self.ledger.find(tensor))
        self._replayed_views = ReplayedViews()
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
        if self.keeps_numbers and _is_of_numbers(args, kwargs):
            return self._with_numbers(OpCall(func, args, kwargs, self.spec))
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
                    args, kwargs = tree_map_only(torch.Tensor, self._fake_of, (args, kwargs))
                    call = OpCall(func, args, kwargs, self.spec)
                decomposition = self._decomposition(call)
                if decomposition is None:
                    return self._record(call, types)
                return self._run_decomposition(decomposition, call)
        finally:
            placement.reports_cuda_device, self._is_inside = reported, False

    def _decomposition(self, call: OpCall) -> Callable[..., Any] | None:
        """What runs instead of a composite operator; None for a primitive one."""
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
        copies = self._replayed_views.has_copied(call, node)
        decomposition = self._copied_first(call, node) if copies else None
        decomposition = decomposition or self._gradients.instead(call, node, self._silently)
        return decomposition or decomposition_of(call, is_wrapped=self._is_in_wrapper)

    def _packed(self, call: OpCall) -> Callable[..., Any]:
        """What packs sequences: of unknown lengths, or of those in the batch."""
        lengths: Any = call.args[1]
        if lengths.constant is None:
            self.open_shapes.append(call.operator)
        values = self.values.get(lengths) if self.values.decide_shapes else None
        return partial(
            pack_padded, values=values, assumed=self.assumed, on_host=self.placement.on_host
        )

    def _silently(self, op: Any, *args: Any, **kwargs: Any) -> object:
        """Run an operator without recording it."""
        with self.unrecorded():
            return op(*args, **kwargs)

    def _copied_first(self, call: OpCall, node: Any) -> Callable[..., Any] | None:
        """What runs instead of a view of a gradient that autograd copies; None for the view."""
        gradient: Any = call.args[0]
        storage = gradient.untyped_storage()
        if storage.nbytes() != dense_bytes(gradient) or not self._in_place.is_last_view(
            gradient, call.op
        ):
            return lambda *args, **kwargs: call.op(copied(args[0]), *args[1:], **kwargs)
        # The view of a copy would be one of the gradient for autograd, and so keep it.
        self.ledger.replace(storage, "aten::new_zeros", sequence_nr(node))
        return None

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

    def _with_numbers(self, call: OpCall) -> object:
        """Run an operator on real host tensors; record those that are meant for the device."""
        if is_collective(call.operator):
            self.in_flight.begun(())
        with no_dispatch():
            outputs = call.op(*call.args, **call.kwargs)
        if (
            self.is_recording
            and call.op is _aten.empty.memory_format
            and call.kwargs.get("device") is not None
        ):
            self.ledger.add(outputs, Category.TEMPORARY, call.operator)
        return outputs

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

    def close_blas_handles(self) -> None:
        """Free the workspaces of cuBLAS; the next matrix product opens its handle again."""
        self._kernels.close_handles(self.ledger)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Run a backward pass inside, for which CUDA has a thread of its own."""
        before, self._is_in_backward = self._is_in_backward, True
        try:
            yield
        finally:
            self._is_in_backward = before

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a fake of a real tensor in the step's code.

        An operator in place would change the user's tensor.
        """
        if isinstance(tensor, FakeTensor) or tensor.layout not in (torch.strided, torch.sparse_coo):
            return tensor
        if id(tensor) not in self._fakes:
            if tensor.layout is torch.sparse_coo:
                indices, values = map(self._fake_of, dense_parts(tensor))
                fake = sparse_tensor(
                    indices, values, tensor.shape, is_coalesced=tensor.is_coalesced()
                )
            else:
                fake = self._fake_of_strided(tensor)
                self.ledger.add(fake, None, "", is_host=tensor.device.type == "cpu")
            # The real one is kept, so that its id is not given out again.
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]

    def _fake_of_strided(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or not self.may_turn_const(tensor):
            with self:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            remember_values(fake, tensor)
            return fake
        with no_dispatch():
            values = tensor.clone()
        return self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)

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
            self.assumed[_MIXED.format(name)] = None
        try:
            call = call.returning(self._result(call, types))
        except DataDependentOutputException:
            return self._read_value(call)
        except DynamicOutputShapeException:
            call = call.returning(self._of_open_shape(call))
        self.num_flops += num_flops(call)
        self.sent_bytes += sent_bytes(call)
        if reused is not None:
            self._record_in_place(call, reused, number)
            self.values.overwrite(reused)
            return call.result
        if self.spec is None:
            for tensor in call.outputs:
                if self.ledger.find(tensor) is None:
                    self.ledger.add(tensor, None, name).node = number
        else:
            corrected = corrected_result(call)
            call = call if corrected is None else call.returning(corrected)
            self._record_cuda(call, number)
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

    def _read_value(self, call: OpCall) -> object:
        """A placeholder for a value that is read from a tensor."""
        known = self.values.read(call)
        if known is not None:
            return known
        value = placeholder_value(call, self.ledger.find(call.args[0]))
        # The optimizer reads counts of steps, and the scaler's search for infinities.
        if self.ledger.phase is not Phase.OPTIMIZER_STEP:
            self.assumed[
                f"The step's code reads a value of a tensor, which is unknown here: {value!r} was "
                f"assumed ({call.operator})."
            ] = None
        return value

    def _is_on_host(self, call: OpCall) -> bool:
        """Whether the host computes the result of a call."""
        if self.spec is None:
            return True
        entry = self.ledger.find(call.outputs[0]) if call.outputs else None
        return entry is not None and entry.is_host

    def _of_open_shape(self, call: OpCall) -> Any:
        """The largest result of an operator with an open shape, else that of known values."""
        known = self.values.shaped(call) if self.values.decide_shapes else None
        if known is not None:
            self.assumed[_OF_THIS_BATCH.format(call.operator)] = None
            return known
        try:
            result = placeholder_result(call, self.bounds)
        except NoPlaceholder:
            result = self.values.shaped(call)
            if result is None:
                raise
            return result
        self.assumed[_LARGEST.format(call.operator)] = None
        self.open_shapes.append(call.operator)
        return result

    def _record_in_place(self, call: OpCall, reused: torch.Tensor, node: int) -> None:
        """Record an operator that CUDA runs in place, in the allocation of `reused`."""
        called, args = IN_PLACE.get(call.op, call.op), call.args
        if called is _aten._index_put_impl_.default:
            args = (*args, True)  # indices that were right in the forward pass are not checked
        if self.spec is not None:
            self._kernels.write(
                self.ledger,
                OpCall(called, args, call.kwargs, self.spec, [reused]),
                call.operator,
                node,
                is_backward=self._is_in_backward,
            )
        self.ledger.move(reused, call.result)

    def _record_cuda(self, call: OpCall, node: int) -> None:
        """Record what a CUDA operator allocates."""
        name, ledger = call.operator, self.ledger
        unknown = [tensor for tensor in call.outputs if ledger.find(tensor) is None]
        if unknown and self.placement.makes_host(call):
            is_meta = self.placement.makes_meta(call)
            for tensor in unknown:
                ledger.add(tensor, None, name, is_host=True).is_meta = is_meta
        else:
            if moment_bytes := temporary_bytes(name, call.args):
                ledger.free(ledger.alloc_temp(moment_bytes, Category.TEMPORARY, name))
            copies = [
                ledger.alloc_temp(dense_bytes(index), Category.TEMPORARY, name)
                for index in self.placement.host_indices(call)
            ]
            self._kernels.write(ledger, call, name, node, is_backward=self._is_in_backward)
            for copy in copies:
                ledger.free(copy)
        if call.op is _aten.resize_.default:
            storage = call.outputs[0].untyped_storage()
            entry = ledger.find(call.outputs[0])
            is_changed = entry is not None and entry.size_bytes != storage.nbytes()
            if entry is not None and not entry.is_host and is_changed:
                ledger.resize(storage)

    def calibrate(self) -> None:
        """Count the references to gradients that certainly nobody else holds."""
        assert not self.is_recording
        is_on = torch.is_anomaly_enabled()
        with (
            self,
            torch.enable_grad(),
            # Its search for NaN does not run on sparse fakes.
            torch.autograd.set_detect_anomaly(is_on, check_nan=False),
            self._in_place.calibrating(),
        ):
            self.is_recording = True
            x = torch.empty(2, 2, requires_grad=True, device="cpu")
            (x.sin() + x.cos()).sum().backward()
            rows = torch.empty(1, dtype=torch.int64, device="cpu")
            torch.embedding(
                torch.empty_like(x, requires_grad=True), rows, sparse=True
            ).sum().backward()
            self.is_recording = False
        self.ledger = Ledger()


def _is_of_numbers(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether an operator makes an empty int32 tensor, or works on real tensors alone."""
    tensors = tensors_of((*args, *kwargs.values()))
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors) and (
        bool(tensors) or kwargs.get("dtype") is torch.int32
    )
