"""Lets torch.compile compile for a CUDA card on a machine without one, down to its own code.

Dynamo, AOTAutograd and Inductor run as they are, on fake tensors that are on `cuda:0` for Python
and on `meta` for C++, which may know no CUDA device. Inductor's scheduler decides what is fused,
allocated, reused and freed; its Triton kernels are written down and not compiled. What it writes,
the module that calls the kernels, runs in the trace (`generated_code`).
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor

from memcallback.core.torch_private import suggest_memory_format
from memcallback.cuda.decompositions.registry import for_compiler, is_compiling
from memcallback.devices.catalogue import DeviceSpec
from memcallback.step.copies.modes import without_modes
from memcallback.trace.dispatch.mode import CUDA, TraceMode
from memcallback.trace.patches.compiled_optimizers import optimizer_patches
from memcallback.trace.patches.cuda_api import DeviceProperties
from memcallback.trace.patches.cuda_graphs import GraphTree, trees
from memcallback.trace.patches.generated_code import module_of
from memcallback.trace.patches.known_by_dynamo import known_by_dynamo
from memcallback.trace.patches.patching import Patch, patched

_CPU, _META = torch.device("cpu"), torch.device("meta")
_DEVICE = torch.ops.prim.device.default
_DEVICE_PUT = torch.ops.prims.device_put.default
_UNPADDED = (
    "Inductor measures on the card whether to pad matrices whose sizes are not multiples of "
    "8 (of 4 in float32). Here they are not padded; padded ones need more memory."
)
_WITHOUT_GRAPH = (
    "A compiled function runs without a CUDA graph, as it would on the card: PyTorch says {!r}."
)
_WITHOUT_TREES = (
    "CUDA graphs were traced as those of cudagraph trees, which share memory. With "
    "triton.cudagraph_trees=False each graph keeps memory of its own: allocated and reserved are "
    "too low."
)
#: Options of Inductor that need a card: choices by measuring.
_NEED_A_CARD = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
    "triton.autotune_at_compile_time",
)


def _of(name: str) -> Any:
    """A module of the compiler. What it lacks makes compiling fail, and a trace go without."""
    return import_module(f"torch.{name}")


@contextmanager
def compiling(mode: TraceMode, graphs: GraphTree) -> Iterator[None]:
    """Compile inside, for the card of a trace; what runs meanwhile is not recorded."""
    inductor_config, functorch_config = _of("_inductor.config"), _of("_functorch.config")
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        stack.enter_context(mode.unrecorded())
        mode.placement.reports_cuda_device = True
        stack.enter_context(for_compiler(_card_of(mode)))
        stack.enter_context(patched(_fake_patches()))
        stack.enter_context(patched(_inductor_patches(mode, graphs)))
        stack.enter_context(patched(optimizer_patches(mode)))
        stack.enter_context(known_by_dynamo())
        stack.enter_context(
            inductor_config.patch(
                {
                    "fx_graph_cache": False,
                    "fx_graph_remote_cache": False,
                    "compile_threads": 1,
                    **dict.fromkeys(_NEED_A_CARD, False),
                }
            )
        )
        stack.enter_context(_no_cache_folder())
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def _card_of(mode: TraceMode) -> DeviceSpec:
    assert mode.spec is not None  # else nothing is compiled
    return mode.spec


def skip_all() -> Any:
    """What Dynamo is told to run a frame as it is, and all that it calls."""
    action, strategy = (
        getattr(_of("_C._dynamo.eval_frame"), name)
        for name in ("_FrameAction", "_FrameExecStrategy")
    )
    answer: Any = _of("_dynamo.types").ConvertFrameReturn
    return answer(frame_exec_strategy=strategy(action.SKIP, action.SKIP))


@contextmanager
def _no_cache_folder() -> Iterator[None]:
    """Have Inductor name files in a folder that is there; none is written."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _fake_patches() -> Iterator[Patch]:
    """Let fakes on `cuda:0` be on `meta` for C++, with the dispatch keys of CPU tensors."""
    tensor: Any = torch.Tensor
    make, dispatch_fake = tensor._make_subclass, FakeTensor.__torch_dispatch__
    dispatch, call_proxy = FakeTensorMode.dispatch, proxy_tensor.proxy_call

    def make_subclass(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device_for_backend_keys")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device_for_backend_keys"] = _CPU
        return make(*args, **kwargs)

    def is_asked_by_cpp(func: Any, args: Sequence[Any]) -> bool:
        return (
            func is _DEVICE
            and not args[0].fake_mode.in_kernel_invocation
            and args[0].fake_device.type == "cuda"
        )

    def of_fake(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_asked_by_cpp(func, args):
            return _META
        return dispatch_fake(func, types, args, kwargs or {})

    def of_mode(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_asked_by_cpp(func, args):
            return _META
        return dispatch(self, func, types, args, _on_device(kwargs))

    def of_proxy(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        if func is _DEVICE_PUT and (
            known := proxy_tensor.get_proxy_slot(args[0], mode.tracer, None)
        ):
            known.constant = None  # else its value is moved to the card
        return call_proxy(mode, func, pre_dispatch, args, _on_device(kwargs))

    yield tensor, "_make_subclass", make_subclass
    yield FakeTensor, "__torch_dispatch__", classmethod(of_fake)
    yield FakeTensorMode, "dispatch", of_mode
    yield proxy_tensor, "proxy_call", of_proxy
    if (flex := sys.modules.get("torch._higher_order_ops.flex_attention")) is not None:
        # Replaced there alone: Dynamo knows `torch.get_autocast_dtype` in programs by its identity.
        yield flex, "torch", _TorchOfFlex()
    # `torch.tensor` would make its numbers on the device itself.
    yield FakeTensorMode, "avoid_device_init", property(lambda self: True)
    yield fake_tensor, "init_gpu_context", lambda device: None
    yield torch._C, "_conv_determine_backend_memory_format", _convolution_format
    for kind in ("meta", "cuda", "cpu"):
        yield FakeTensor, f"is_{kind}", property(partial(_is_on, kind))


class _TorchOfFlex:
    """What flex_attention's operator finds as `torch`; its inputs, wrapped by then, are on meta."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def get_autocast_dtype(device_type: str) -> torch.dtype:
        """That of the card."""
        return torch.get_autocast_dtype("cuda" if device_type == "meta" else device_type)


def _convolution_format(
    inputs: torch.Tensor, weight: torch.Tensor, backend: Any
) -> torch.memory_format:
    """The memory format of what cuDNN returns (`cudnn_conv_use_channels_last` in ConvUtils.h)."""
    formats = {suggest_memory_format(inputs), suggest_memory_format(weight)}
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        if channels_last in formats and inputs.dtype is not torch.float64:
            return channels_last
    return torch.contiguous_format


def _is_on(kind: str, tensor: FakeTensor) -> bool:
    return tensor.device.type == kind


def _on_device(kwargs: Any) -> dict[str, Any]:
    """Keyword arguments in which the device that C++ sees is what it stands for."""
    if kwargs and kwargs.get("device") is not None and kwargs["device"].type == "meta":
        return {**kwargs, "device": CUDA}
    return kwargs or {}


def _inductor_patches(mode: TraceMode, graphs: GraphTree) -> Iterator[Patch]:
    """Answer for the card and for Triton, take the inputs' fakes, and keep the generated code."""
    guards, graph = _of("_dynamo.guards"), _of("_inductor.graph")
    compile_fx, scheduler = _of("_inductor.compile_fx"), _of("_inductor.scheduler")
    interface = _of("_dynamo.device_interface").CudaInterface
    folder = _of("_inductor.fx_passes.joint_graph").UniformValueConstantFolder
    config = _of("_inductor.config")
    properties = DeviceProperties(
        **vars(torch.cuda.get_device_properties(0)),
        # The same on all cards since compute capability 3.5.
        regs_per_multiprocessor=65_536,
        max_threads_per_block=1_024,
        gcnArchName="",
    )
    compile_ = compile_fx.compile_fx

    @wraps(compile_)
    def compile_on_fakes(
        gm: Any,
        inputs: Any,
        inner_compile: Callable[..., Any] = compile_fx.compile_fx_inner,
        config_patches: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        known = {
            name: value
            for name, value in (config_patches or {}).items()
            if name not in _NEED_A_CARD
        }

        def compile_inner(*args: Any, **kwargs: Any) -> Any:
            graphs.num_compiled += 1
            with ExitStack() as stack:
                # Of the backward pass perhaps later, while that runs.
                if not is_compiling():
                    stack.enter_context(compiling(mode, graphs))
                if config.triton.cudagraphs:
                    stack.enter_context(patched(_graph_patches(mode, graphs)))
                return inner_compile(*args, **kwargs)

        return compile_(
            gm,
            _fakes_of(gm, inputs),
            inner_compile=compile_inner,
            config_patches=known,
            **kwargs,
        )

    def unpadded(key: Any) -> bool:
        mode.assumed[_UNPADDED] = None
        return False

    def compile_to_module(lowering: Any) -> Any:
        code, _ = lowering.codegen()
        lowering.cache_path = lowering.cache_key = ""
        lowering.cache_linemap = []
        return module_of(getattr(code, "value", code), mode)

    yield torch.cuda, "get_device_properties", lambda device=None: properties
    yield compile_fx, "compile_fx", compile_on_fakes
    yield graph.GraphLowering, "compile_to_module", compile_to_module
    yield compile_fx, "CompiledFxGraph", _compiled_graph(compile_fx.CompiledFxGraph)
    yield guards.GuardBuilder, "TORCH_FUNCTION_STATE", _no_guard(guards)
    yield folder, "_deduce_value", _deduced_on_host(folder._deduce_value)
    # Measuring decides, unless it has decided before.
    yield _of("_inductor.fx_passes.pad_mm"), "get_cached_should_pad", unpadded
    # Kernels from templates, as flex_attention's, are written to files to be measured.
    templates = _of("_inductor.select_algorithm")
    unwritten = {"load": staticmethod(_not_written)}
    yield templates, "PyCodeCache", type("PyCodeCache", (templates.PyCodeCache,), unwritten)
    # It writes down the graph for bug reports, and asks a compiler for its version.
    yield _of("_dynamo.repro.after_aot"), "save_graph_repro", lambda *args, **kwargs: None
    yield scheduler, "has_triton", lambda *args: True
    yield compile_fx, "has_triton", lambda *args: True
    yield _of("utils._triton"), "triton_hash_with_backend", lambda: ""
    for name, answer in {
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "get_raw_stream": lambda index: 0,
        "raise_if_triton_unavailable": lambda device=None: None,
    }.items():
        if hasattr(interface, name):
            yield interface, name, answer
    # A trace has a function in its place, and Dynamo asks what is one.
    yield torch.cuda, "StreamContext", type("StreamContext", (), {})
    _of("_inductor.runtime.hints").DeviceProperties.create.cache_clear()


def _not_written(code: str, *args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(__file__="", key=hashlib.sha256(code.encode()).hexdigest())


def _deduced_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compute Inductor's constants, real tensors of one element, on the host."""

    @wraps(original)
    def deduce(self: Any, node: Any) -> Any:
        if node.target is torch.ops.prims.device_put.default:
            return self.fetch_args_kwargs_from_env(node)[0][0]
        kwargs = node.kwargs
        if kwargs.get("device") is None:
            return original(self, node)
        node.kwargs = {**kwargs, "device": _CPU}
        try:
            return original(self, node)
        finally:
            node.kwargs = kwargs

    return deduce


def _no_guard(guards: Any) -> Callable[..., None]:
    """Guards would see the function modes of a trace, which are set aside while it compiles."""

    @wraps(guards.GuardBuilder.TORCH_FUNCTION_STATE)
    def guard(self: Any, guard: Any) -> None:
        pass

    return guard


def _fakes_of(gm: Any, inputs: Sequence[Any]) -> list[Any]:
    """Dynamo's fakes of the inputs of a graph, which themselves are fakes of the trace.

    A number that may change is a real tensor, whose value the compiler reads.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(nodes) != len(inputs):
        return list(inputs)
    values = (node.meta.get("example_value") for node in nodes)
    return [
        value if isinstance(value, torch.Tensor) and isinstance(given, FakeTensor) else given
        for value, given in zip(values, inputs, strict=True)
    ]


def _compiled_graph(original: Any) -> Any:
    """The class of what Inductor returns for a graph, without what needs real tensors."""

    class CompiledGraph(original):  # type: ignore[misc]
        def post_compile(self, *args: Any) -> None:
            """Tell the backward pass the strides of its inputs; make CUDA graphs if asked for."""
            self.inputs_to_check = ()  # Fakes have no address that could be aligned.
            super().post_compile(*args)

    return CompiledGraph


def _graph_patches(mode: TraceMode, graphs: GraphTree) -> Iterator[Patch]:
    """Run functions as the graphs of a trace; PyTorch itself decides which have one, and why."""
    if not _of("_inductor.config").triton.cudagraph_trees:
        mode.assumed[_WITHOUT_TREES] = None

    def note_skipped(reason: str) -> None:
        mode.assumed[_WITHOUT_GRAPH.format(str(reason).strip().splitlines()[0])] = None

    output_code = _of("_inductor.output_code")
    yield _of("_inductor.compile_fx"), "cudagraphify", graphs.graphed
    yield output_code, "log_cudagraph_skip_and_bump_counter", note_skipped
    utils = _of("_inductor.cudagraph_utils")
    if hasattr(utils, "check_caching_allocator_for_cudagraphs"):
        # It asks C++ of a build for CUDA.
        yield utils, "check_caching_allocator_for_cudagraphs", lambda: None
    yield trees(), "get_manager", lambda *args, **kwargs: graphs
