"""TraceMode: the fake tensor mode that records what each operator allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from memcallback.core.tensors import dense_parts, is_wrapper, new_ragged_size, sparse_tensor
from memcallback.core.types import Category, Phase
from memcallback.cuda.convolution.rule import convolution_outputs
from memcallback.cuda.decompositions.packed_sequences import pack_padded
from memcallback.cuda.decompositions.registry import composite
from memcallback.cuda.decompositions.sparse import sparse_operator
from memcallback.cuda.outputs import given_instead, output_bytes
from memcallback.cuda.rules import CONVOLUTIONS, corrected_outputs
from memcallback.devices.catalogue import DeviceSpec
from memcallback.trace.dispatch.collectives import (
    WAIT,
    InFlight,
    is_collective,
    sent_bytes,
    temporary_bytes,
    with_result,
)
from memcallback.trace.dispatch.in_place import IN_PLACE, InPlace
from memcallback.trace.dispatch.kernel_entries import KernelEntries
from memcallback.trace.dispatch.ledger import Ledger
from memcallback.trace.dispatch.operators import (
    is_of_numbers,
    laid_out,
    name_of,
    num_flops,
    tensors_of,
)
from memcallback.trace.dispatch.output_cache import OutputCache
from memcallback.trace.dispatch.placeholders import (
    SILENT,
    Bounds,
    is_known_to_hold,
    stand_in_shape,
    stand_in_value,
)

_aten = torch.ops.aten
#: Operators that make a tensor which is a part of its storage.
_CUT = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in (
        "bartlett_window",
        "blackman_window",
        "hamming_window",
        "hann_window",
        "kaiser_window",
    )
    for overload in getattr(_aten, name).overloads()
)
_DEVICE = torch.ops.prim.device.default
_READ = _aten._local_scalar_dense.default
#: Operators that take a real tensor as it is: those that make a fake of it, and the one that reads
#: its value.
_READS_REAL = frozenset(
    {_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default, _READ}
)
#: Operators that make tensors of numbers from nothing; and of how many whole numbers in a tensor
#: the values are kept.
_NUMBERS = frozenset(
    {
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        *(getattr(_aten.arange, name) for name in ("default", "start", "start_step")),
    }
)
_MOST_NUMBERS_KEPT = 65_536
CUDA = torch.device("cuda", 0)
_MEMO = OutputCache()


class TraceMode(FakeTensorMode):
    """A fake tensor mode in which every tensor is one of a CUDA device or of the host, or all are
    of a CPU.

    To C++ all of them lie on the CPU, since a PyTorch without CUDA knows no other device; Python
    code that asks is told `cuda:0` by those that stand for a tensor of the device (`CudaFunctions`
    in cuda_semantics).

    Attributes:
        ledger: What is written down.
        spec: The card; None to train on a CPU, where all memory is written down.
        assumed: What stood in for values that fakes do not have, one sentence each.
        is_recording: Whether operators are written down.
        operator: The one that ran last.
        num_flops: Floating-point operations of what was written down, by PyTorch's own formulas
            (torch.utils.flop_counter).
        sent_bytes: What the rank sent of what was written down.
        target: Where new storages of the call that is running are: "device", "host", or None where
            that follows from its tensors.
        call: The arguments of the call of a torch function that is running, None where there is
            none.
        reports_cuda_device: Whether Python code that asks a tensor for its device is user code.
        in_flight: What collectives hold on to.
        modules: The module in whose forward pass an autograd node of that number was made; None
            where nobody asks.
        follow_streams: Makes the stream current in which the autograd node that runs was made; None
            where there was one stream.
        keeps_numbers: Whether C++ code is running that reads the numbers which it writes into
            tensors.
    """

    def __init__(
        self, ledger: Ledger, spec: DeviceSpec | None, bounds: Bounds | None = None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ledger = ledger
        self.spec = spec
        self._bounds = bounds or Bounds()
        self.assumed: dict[str, None] = {}
        self.is_recording = False
        self.operator = ""
        self.num_flops = self.sent_bytes = 0
        self.target: str | None = None
        self.call: tuple[object, ...] | None = None
        self.reports_cuda_device = False
        self.modules: Callable[[int], str] | None = None
        self.follow_streams: Callable[[], None] | None = None
        self.keeps_numbers = False
        self.in_flight = InFlight()
        self._is_inside = False
        self._is_in_backward = False
        self._is_in_wrapper = False
        self._is_passed_on = False
        self._kernels = None if spec is None else KernelEntries(spec)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_place = InPlace(lambda tensor: self.ledger.find(tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks whether compilation is to be kept out of each dispatch, which takes longer
        than most of them: `_eager` does that.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator on shapes, and write down what it allocates if it is not a part of
        another.
        """
        if func is _DEVICE:
            return args[0].fake_device  # type: ignore[attr-defined]
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            if self._is_passed_on:
                self._is_passed_on = False
                return NotImplemented
            return self._by_wrapper(func, args, kwargs)
        if self.keeps_numbers and is_of_numbers(func, args, kwargs):
            return self._with_numbers(func, args, kwargs)
        if self._is_inside or not self.is_recording:
            return self.dispatch(func, types, args, kwargs)
        told, self._is_inside, self.reports_cuda_device = self.reports_cuda_device, True, False
        try:
            with torch._C.DisableTorchFunction():
                if func not in _READS_REAL and any(
                    not isinstance(tensor, FakeTensor)
                    for tensor in tensors_of((*args, *kwargs.values()))
                ):
                    args, kwargs = tree_map_only(torch.Tensor, self._fake_of, (args, kwargs))
                made_of = self._made_of(func, args, kwargs)
                return (
                    self._write_down(func, types, args, kwargs)
                    if made_of is None
                    else self._on_parts(made_of, func, args, kwargs)
                )
        finally:
            self._is_inside, self.reports_cuda_device = False, told

    def _with_numbers(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Run an operator on real tensors of the host; those that are to be on the device are
        written down.
        """
        if is_collective(name_of(func)):
            self.in_flight.begun(())
        with no_dispatch():
            outputs = func(*args, **kwargs)
        if (
            self.is_recording
            and func is _aten.empty.memory_format
            and kwargs.get("device") is not None
        ):
            self.ledger.add(outputs, Category.TEMPORARY, name_of(func))
        return outputs

    def _made_of(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Callable[..., Any] | None:
        """What to call in the place of an operator that is made of others; None for one that is
        not.
        """
        if func is _aten._pack_padded_sequence.default:
            return partial(pack_padded, assumed=self.assumed, on_host=self._on_host)
        is_composite = self._is_in_wrapper and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        )
        return composite(func, self.spec) if is_composite else sparse_operator(func, args, kwargs)

    def _by_wrapper(
        self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Let a tensor that consists of others (a nested one, a DTensor) take the operator apart,
        in code that knows the device of fakes alone.

        It does so below autograd, and composite operators come as a whole from there.
        """
        before, self.reports_cuda_device, self._is_in_wrapper = (
            (self.reports_cuda_device, self._is_in_wrapper),
            False,
            True,
        )
        try:
            # A detach by which autograd makes a view comes from above autograd, and with PyTorch
            # 2.6 makes one by a detach again.
            with (
                self,
                torch._C.DisableTorchFunction(),
                torch._C._AutoDispatchBelowADInplaceOrView(),
            ):
                # PyTorch asks this mode again, which passes it on to the tensor.
                self._is_passed_on = True
                return func(*args, **kwargs)
        finally:
            self.reports_cuda_device, self._is_in_wrapper = before
            self._is_passed_on = False

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """PyTorch asks whether values are kept: those of a number, and here of whole numbers that
        Python code writes down (lengths).
        """
        is_list = (
            not t.is_floating_point()
            and not t.is_complex()
            and t.layout is torch.strided
            and t.numel() <= _MOST_NUMBERS_KEPT
        )
        return super().may_turn_const(t) or (is_list and t.device.type == "cpu")

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> torch.SymInt:
        """PyTorch asks for the ragged size of a nested tensor that is made in the step."""
        return new_ragged_size()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Nothing is written down inside, and tensors are where fakes are."""
        before, self.is_recording, self.reports_cuda_device = (
            (self.is_recording, self.reports_cuda_device),
            False,
            False,
        )
        try:
            yield
        finally:
            self.is_recording, self.reports_cuda_device = before

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """What is made inside is on the host."""
        before, self.target = self.target, "host"
        try:
            yield
        finally:
            self.target = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """A backward pass runs inside, which CUDA has a thread of its own for."""
        was, self._is_in_backward = self._is_in_backward, True
        try:
            yield
        finally:
            self._is_in_backward = was

    def is_on_device(self, tensor: object) -> bool:
        """Whether a tensor stands for one of the device; what the ledger does not know does."""
        if not isinstance(tensor, torch.Tensor):
            return False
        told, self.reports_cuda_device = self.reports_cuda_device, False
        try:
            with torch._C.DisableTorchFunction():
                first = dense_parts(tensor)[0]
                if not isinstance(first, FakeTensor) or first.fake_mode is not self:
                    return False
                entry = self.ledger.find(first)
        finally:
            self.reports_cuda_device = told
        return entry is None or not entry.is_host

    def is_on_meta(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for one of the meta device."""
        with torch._C.DisableTorchFunction():
            entry = self.ledger.find(dense_parts(tensor)[0])
        return entry is not None and entry.is_meta

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a real tensor that the step's code has from elsewhere: an operator in
        place would change the user's.
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
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        with no_dispatch():
            values = tensor.clone()
        return self.fake_tensor_converter.from_real_tensor(self, values, make_constant=True)

    def _node(self) -> Any:
        """The autograd node that runs, None for none."""
        return (
            torch._C._current_autograd_node()
            if self.ledger.phase is not Phase.OPTIMIZER_STEP
            else None
        )

    def _reused(self, func: Any, args: Sequence[object], node: Any) -> torch.Tensor | None:
        return (
            None
            if node is None or torch.is_grad_enabled()
            else self._in_place.reused(func, args, node)
        )

    def _on_parts(
        self,
        made_of: Callable[..., Any],
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        """Run an operator that is made of others, and write these down."""
        reused = self._reused(func, args, self._node())
        self._is_inside = False
        with self:
            if reused is None:
                return made_of(*args, **kwargs)
            if reused.layout is torch.strided:
                return reused.add_(args[1])  # type: ignore[arg-type]
            indices, values = dense_parts(reused)
            return sparse_tensor(indices, values, reused.shape, is_coalesced=reused.is_coalesced())

    def _write_down(
        self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        self.operator = name_of(func)
        node = self._node()
        number = -1
        if node is not None:
            number = node._sequence_nr()
            if self.modules is not None:
                self.ledger.module = self.modules(number)
            if self.follow_streams is not None:
                self.follow_streams()
        reused = self._reused(func, args, node)
        try:
            if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
                raise DataDependentOutputException(func)
            if func in SILENT:
                raise DynamicOutputShapeException(func)
            if self.operator == WAIT:
                return args[0]
            outputs = self._outputs(func, types, args, kwargs)
            if is_collective(self.operator):
                self.in_flight.begun(args[0])
                outputs = with_result(outputs)
            if func in _NUMBERS and self.may_turn_const(outputs):
                with no_dispatch():
                    outputs = func(*args, **{**kwargs, "device": torch.device("cpu")})
                outputs = self.fake_tensor_converter.from_real_tensor(
                    self, outputs, make_constant=True
                )
        except DataDependentOutputException:
            entry = self.ledger.find(args[0])  # type: ignore[arg-type]
            value = stand_in_value(func, args, entry)
            if (
                self.ledger.phase is not Phase.OPTIMIZER_STEP
            ):  # counts of steps, and the scaler's search for infinities
                self.assumed[f"{name_of(func)} reads a value: {value!r} stood for it"] = None
            return value
        except DynamicOutputShapeException:
            outputs = stand_in_shape(func, args, kwargs, self._bounds)
            self.assumed[
                f"{name_of(func)} has a shape that depends on values: the largest possible stood for it"
            ] = None
        self.num_flops += num_flops(func, args, kwargs, outputs)
        self.sent_bytes += sent_bytes(self.operator, args, outputs)
        if reused is not None:
            called = IN_PLACE.get(func, func)
            # Indices that were right in the forward pass are not checked again.
            arguments = (*args, True) if called is _aten._index_put_impl_.default else args
            if self._kernels is not None:
                self._kernels.write(
                    self.ledger,
                    called,
                    arguments,
                    kwargs,
                    [reused],
                    {},
                    name_of(func),
                    number,
                    self._is_in_backward,
                )
            self.ledger.move(reused, outputs)
            return outputs
        if self._kernels is None:
            for tensor in tensors_of(outputs):
                if self.ledger.find(tensor) is None:
                    self.ledger.add(tensor, None, name_of(func)).node = number
        else:
            outputs = self._on_cuda(self._kernels, func, args, kwargs, outputs, number)
        if (holds := is_known_to_hold(func, args, self.ledger.find)) is not None:
            for tensor in tensors_of(outputs):
                if (entry := self.ledger.find(tensor)) is not None:
                    entry.is_truth = holds
        return outputs

    def _outputs(
        self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        if (
            given := given_instead(func, args, kwargs, is_cuda=self._kernels is not None)
        ) is not None:
            return given
        asked = _MEMO.ask(func, args, kwargs)
        if asked is None:
            return self._faked(func, types, args, kwargs)
        recalled = _MEMO.recall(self, *asked)
        if recalled is not None:
            return recalled[0]
        outputs = self._faked(func, types, args, kwargs)
        _MEMO.remember(*asked, outputs)
        return outputs

    def _faked(
        self, func: Any, types: Sequence[type], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        """What the fake kernel gives; without PyTorch's cache, which forgets what outputs leave
        unused of their storage (windows of a spectrum).
        """
        was_enabled, self.cache_enabled = (
            self.cache_enabled,
            self.cache_enabled and func not in _CUT,
        )
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = was_enabled

    def _on_cuda(
        self,
        kernels: KernelEntries,
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        outputs: Any,
        number: int,
    ) -> object:
        """Write down what a CUDA operator does, and give its outputs the layout that they have
        there.
        """
        sizes: list[int] | None = None
        if func in CONVOLUTIONS:
            outputs = laid_out(outputs, convolution_outputs(func, args, kwargs, kernels.spec))
        elif (corrected := corrected_outputs(func, args, kwargs, outputs)) is not None:
            outputs = corrected
        else:
            sizes = output_bytes(func, tuple(args), dict(kwargs), outputs)
        tensors = tensors_of(outputs)
        name = name_of(func)
        unknown = [
            index for index, tensor in enumerate(tensors) if self.ledger.find(tensor) is None
        ]
        new: dict[int, int] = {}
        is_host = self._is_host(args, kwargs) if unknown else False
        for index in unknown:
            size_bytes = (
                tensors[index].untyped_storage().nbytes() if sizes is None else sizes[index]
            )
            if is_host or (sizes is not None and not size_bytes):
                added = self.ledger.add(tensors[index], None, name, is_host=True)
                added.is_meta = self.target is None and any(
                    map(self.is_on_meta, tensors_of((*args, *kwargs.values())))
                )
            else:
                new[tensors[index].untyped_storage()._cdata] = size_bytes
        if (moment_bytes := temporary_bytes(name, args)) and not is_host:
            self.ledger.give(self.ledger.take_temporary(moment_bytes, Category.TEMPORARY, name))
        if not is_host:
            places = list(outputs) if func is _aten.convolution_backward.default else tensors
            kernels.write(
                self.ledger, func, args, kwargs, places, new, name, number, self._is_in_backward
            )
        if func is _aten.resize_.default:
            entry = self.ledger.find(tensors[0])
            if (
                entry is not None
                and not entry.is_host
                and entry.size_bytes != tensors[0].untyped_storage().nbytes()
            ):
                self.ledger.resize(tensors[0].untyped_storage())
        return outputs

    def _is_host(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Whether what an operator makes is memory of the host."""
        if self.target is not None:
            return self.target == "host"
        entries = [
            self.ledger.find(tensor) if isinstance(tensor, FakeTensor) else None
            for tensor in tensors_of((*args, *kwargs.values()))
        ]
        if entries:
            return (
                not any(entry is not None and not entry.is_host for entry in entries)
                and not self._call_is_on_device()
            )
        # A tensor from nothing: from Python on the host unless its call says otherwise, from inside
        # autograd on the device.
        return self.call is not None and not self._call_is_on_device()

    def _call_is_on_device(self) -> bool:
        return self.call is not None and any(
            self.is_on_device(tensor) for tensor in tensors_of(self.call)
        )

    def calibrate(self) -> None:
        """See how many references there are to gradients that are certainly nobody else's."""
        assert not self.is_recording
        with self, torch.enable_grad(), self._in_place.calibrating():
            self.is_recording = True
            x = torch.empty(2, 2, requires_grad=True, device="cpu")
            (x.sin() + x.cos()).sum().backward()
            rows = torch.empty(1, dtype=torch.int64, device="cpu")
            torch.embedding(
                torch.empty_like(x, requires_grad=True), rows, sparse=True
            ).sum().backward()
            self.is_recording = False
        self.ledger = Ledger()
