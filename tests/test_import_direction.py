"""The layers of ARCHITECTURE.md: each module imports only from those above it, and the plain ones know neither torch nor Lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import memcallback

PACKAGE = Path(memcallback.__file__).parent

#: From top to bottom; a module may import from those before it.
ALLOCATOR = ["allocator_settings", "allocator_blocks", "allocator_expandable", "allocator", "allocator_host"]
CUDNN = ["convolution_layout", "cudnn_library", "cudnn", "convolution_workspace", "convolution_bias"]
DATA = [
    "checks",
    "code_lines",
    "search",
    "units",
    "tables",
    "events",
    "phase_windows",
    "kernels",
    "devices",
    *CUDNN,
    "stats",
    *ALLOCATOR,
    "warn",
    "guarded",
    "layer_table",
    "module_memory",
]
PLAIN = [
    *DATA,
    "traced_step",
    "batch_trace",
    "length_trace",
    "repetition",
    "replay",
    "module_spans",
    "predicted",
    "prediction_text",
    "prediction",
    "snapshot",
    "textbook_law",
    "differences",
    "peak_lines",
    "rank_figures",
    "rank_points",
    "advice",
    "advise",
    "segments",
    "plan",
    "report",
    "whole_files",
    "oom_report",
    "fitted",
    "tensor_changes",
    "filling_lines",
    "growth",
    "health",
]
CONVOLUTION = ["convolution_call", "convolution_steps", "convolution_slow", "cuda_convolution"]
KERNEL_RULES = ["attention", "sort", "index", "loss", "matrix", "norm", "other", "outputs", "reductions", "sparse"]
KERNELS = ["cuda_kernels_plan", "cuda_kernels_reduce", *(f"cuda_kernels_{name}" for name in KERNEL_RULES), "cuda_kernels"]
COMPOSITES = [
    "packed_sequences",
    "cuda_attention_choice",
    "cuda_attention",
    "cuda_outputs",
    "fake_shapes",
    "cuda_norms",
    "cuda_rnn",
    "cuda_composites",
    "cuda_autocast",
]
CUDA = [*CONVOLUTION, *KERNELS, *COMPOSITES]
ON_FAKES = [
    "output_memo",
    "operator_calls",
    "in_place",
    "sparse_operators",
    "collectives",
    "kernel_entries",
    "trace_mode",
    "own_thread",
    "fake_answers",
    "cuda_functions",
    "backward_nodes",
    "cuda_flex_attention",
    "cuda_streams",
    "cuda_answers",
    "cuda_semantics",
    "transformers_masks",
    "rank_answers",
]
TRACER = [
    "cuda_calls",
    "ledger",
    "stand_ins",
    *ON_FAKES,
    "loop_parts",
    "loop_by_hand",
    "loop_pipelined",
    "loops",
    "trace_marks",
    "tracer",
    "device_here",
    "tracing",
    "batch_lengths",
    "suggestion",
]
MEASURING = [
    "hook_handles",
    "holdings",
    "saved_tensors",
    "frame_tensors",
    "live_tensors",
    "module_hooks",
    "tensor_parts",
    "nvml",
    "device_states",
    "cpu_meter",
    "meters",
    "module_watch",
    "oom",
    "oom_moments",
    "tensor_ledger",
    "tensor_diff",
    "leaks",
    "health_watch",
    "lightning_step",
    "step_checks",
    "default_loss",
    "savings_layers",
    "function_copies",
    "fakes",
    "fake_world",
    "pipelines",
    "ranks",
    "steps",
    "rank_messages",
    "oom_explained",
    "optimizer_copy",
    "backward_calls",
    "uncaught",
    "watching",
    "recording",
    "open_step",
    "recorder",
    "rank_exchange",
    "resizing",
    "shape_pass",
    "optimizer_state",
]
SAVINGS = ["savings_checkpoint", "savings_amp", "savings_accumulate", "savings", "variants", "rank_variants", "planning"]
RUNNING = ["run_state", "loaders", "gauge", "fit_settings"]
TORCH = [*MEASURING, *CUDA, *TRACER, "textbook", *SAVINGS, *RUNNING]
FITTING = ["trial", "fit_callbacks", "fit_search", "fit"]
ADAPTERS = [
    "figures",
    "tensorboard",
    "sinks",
    "rescue",
    "journal",
    "savings_lightning",
    "foretold",
    "memory_log",
    "huggingface_step",
    "huggingface_callback",
    "lightning_ranks",
    "forecast",
    *FITTING,
    "trainer_state",
    "callback",
    "targets",
    "cli",
    "__main__",
]
ORDER = PLAIN + TORCH + ADAPTERS
HEAVY = {"torch", "lightning", "pytorch_lightning", "tensorboard", "numpy", "pynvml"}


def imports(source, *, at_run_time=False):
    """Names of the modules that a source imports; with `at_run_time` not those under `if TYPE_CHECKING`."""
    tree = ast.parse(source)
    skipped = set()
    if at_run_time:
        guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING"]
        skipped = {id(child) for node in guarded for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def violations(sources, order):
    """What breaks the direction, one sentence each."""
    found = []
    for name, source in sources.items():
        if name not in order:
            found.append(f"{name} has no place in the layers")
            continue
        for imported in imports(source):
            if imported.startswith("memcallback."):
                other = imported.removeprefix("memcallback.").split(".")[0]
                if other not in order or order.index(other) >= order.index(name):
                    found.append(f"{name} imports {other}, which is not above it")
        if name in PLAIN:
            found += [f"{name} imports {i}, and is plain" for i in imports(source, at_run_time=True) if i.split(".")[0] in HEAVY]
    return found


def sources():
    return {path.stem: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_every_module_imports_only_from_those_above_it():
    assert violations(sources(), ORDER) == []


def test_no_layer_is_named_that_is_not_there():
    assert set(ORDER) == set(sources())


def test_the_check_finds_an_import_against_the_direction():
    broken = sources() | {"stats": "from memcallback.recorder import MemoryRecorder\n"}
    assert violations(broken, ORDER) == ["stats imports recorder, which is not above it"]


def test_the_check_finds_torch_in_a_plain_module():
    broken = sources() | {"units": "def f():\n    import torch\n"}
    assert violations(broken, ORDER) == ["units imports torch, and is plain"]


def test_the_check_finds_a_module_without_a_place():
    assert violations(sources() | {"helpers": ""}, ORDER) == ["helpers has no place in the layers"]


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ModuleNotFoundError(f"no {{name}} here")
sys.meta_path.insert(0, Refuse())
import memcallback
assert memcallback.format_bytes(123 * 2**20) == "123.00 MiB"
assert memcallback.Phase.FORWARD.label == "forward"
import {plain}
print("ok", len([m for m in sys.modules if m.split(".")[0] in {heavy!r}]))
"""


def test_the_plain_modules_work_where_torch_is_not_installed():
    script = WITHOUT_TORCH.format(heavy=sorted(HEAVY), plain=", ".join(f"memcallback.{name}" for name in PLAIN))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "ok 0\n", done.stderr


def test_every_public_name_is_there():
    for name in memcallback.__all__:
        assert getattr(memcallback, name) is not None
    assert sorted(memcallback.__all__) == memcallback.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = memcallback.nothing


def test_no_module_takes_the_place_of_a_public_name():
    # Once a module is imported, it is an attribute of the package.
    assert not set(memcallback.__all__) & set(sources())
