"""What every test may use: small Lightning modules, quiet trainers, and whether there is a CUDA
device.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from run_parts import part, parts_of, seconds_of
from slow_files import SLOW_FILES
from virtual_device import AscendingAddresses, is_virtual

# With AVX-512 oneDNN packs the matrices of a product in half precision into memory of its own, how
# much depends on the processor. What operators take for themselves on a CPU is not predicted.
# oneDNN reads this when it is first used, here and in the programs that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# Most tests of predictions look into them, which they can in this process alone. What concerns the
# process of its own (tests/isolation, tests/untouched) turns it on.
os.environ.setdefault("MEMCALLBACK_ISOLATE", "0")

# A shell ignores Ctrl-C for what it starts in the background, and programs that tests start would
# inherit that; then none ends by it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers of pytest-xdist share the cores; threads of their own would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes on a busy machine says nothing of what it shows.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


#: The position of each slow file in a run.
ORDER = {path: position for position, path in enumerate(SLOW_FILES)}


def path_of(path):
    """The path below this folder, as `SLOW_FILES` has it."""
    return Path(os.path.relpath(path, Path(__file__).parent)).as_posix()


def pytest_ignore_collect(collection_path, config):
    if config.getoption("--quick") and path_of(collection_path) in ORDER:
        return True
    if config.option.markexpr == "cuda" and collection_path.match("test_*.py"):
        # Most files have no such test, and it takes long to import them.
        return True if not names_marker(collection_path) else None
    return None  # whatever else decides


def names_marker(path):
    return "pytest.mark.cuda" in path.read_text(encoding="utf-8")


def pytest_configure(config):
    # Else pytest-xdist begins with the files of most tests, and the slowest have few.
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)  # after `-m` has left tests out
def pytest_collection_modifyitems(config, items):
    if chosen := config.getoption("--part"):
        number, num_parts = chosen
        on_device = config.option.markexpr == "cuda"
        seconds = seconds_of((path_of(item.path) for item in items), on_device=on_device)
        of_part = parts_of(seconds, num_parts)[number - 1]
        others = [item for item in items if path_of(item.path) not in of_part]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if path_of(item.path) in of_part]
    items.sort(key=lambda item: ORDER.get(path_of(item.path), len(ORDER)))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    paths = {item.path for item in marked}
    unnamed = sorted(str(path) for path in paths if not names_marker(path))
    if unnamed:
        raise pytest.UsageError(f"`-m cuda` leaves out {unnamed}: name pytest.mark.cuda in them")
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_set_aside():
    """No collection and no search for tensors goes through what imports made (some 700,000 objects)
    and what other modules' tests keep.
    """
    gc.collect()
    gc.freeze()


# Collecting less often saves time; Python's default is (700, 10, 10).
gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Garbage of other tests that goes during a test of the device's memory would count as memory
    # that the test let go of.
    if item.get_closest_marker("cuda"):
        gc.collect()


def pytest_addoption(parser):
    parser.addoption(
        "--overwrite-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )
    parser.addoption(
        "--quick", action="store_true", help="leave out the slow files (see tests/slow_files.py)"
    )
    parser.addoption(
        "--part",
        type=part,
        metavar="NUMBER/TOTAL",
        help="run the files of one part of so many, which take about as long as one another; fewer "
        "files than parts leave parts empty",
    )
    parser.addoption(
        "--num-programs",
        type=int,
        default=0,
        help="how many programs test_generated_programs.py draws anew; else few, and always the "
        "same",
    )


@pytest.fixture
def pictures():
    """For tests that draw what a report shows, in a file that else does without."""


@pytest.fixture
def without_pictures(request, monkeypatch):
    """They take as long as the rest of a short training."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("memcallback.report.pictures.Pictures.log", lambda *_: None)


@pytest.fixture(autouse=True)
def as_a_virtual_device(monkeypatch):
    """On a virtual device, cuDNN offers no plan that needs a real one, and counts as described.

    Its segments lie elsewhere.
    """
    if is_virtual():
        from memcallback.cuda.convolution import cudnn, workspace
        from memcallback.prediction.allocator import blocks

        monkeypatch.setattr(blocks, "Addresses", AscendingAddresses)
        monkeypatch.setattr(cudnn, "finds_device", lambda: True)
        monkeypatch.setattr(workspace, "workspace_on_device_bytes", lambda *plan: plan[-1])


@pytest.fixture
def as_the_virtual_device(monkeypatch):
    """Sizes of cuDNN as the virtual device had them for recordings; ours are of real cards.

    It made up those of recurrent layers, with the padding of packed sequences, had no plan of a
    convolution that needs a device, and took workspaces as cuDNN says for a described device.
    """
    from memcallback.cuda.convolution import cudnn, workspace
    from memcallback.cuda.decompositions import rnn

    monkeypatch.setattr(cudnn, "finds_device", lambda: True)
    monkeypatch.setattr(workspace, "workspace_that_needs_device_bytes", lambda *call: None)
    monkeypatch.setattr(workspace, "workspace_on_device_bytes", lambda *plan: plan[-1])
    kept = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 6, "gru": 5}
    gates = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}

    padded = {}
    make = rnn.rnn_kernels

    def with_padding(device):
        def counted(kernel):
            def count(data, batch_sizes, hx, *rest):
                first = hx[0] if isinstance(hx, (list, tuple)) else hx
                padded[len(data)] = len(batch_sizes) * first.shape[1]
                return kernel(data, batch_sizes, hx, *rest)

            return count

        return {
            name: counted(kernel) if name.endswith(".data") else kernel
            for name, kernel in make(device).items()
        }

    def units(call, num_tokens):
        return padded.get(num_tokens, num_tokens) * call.hidden_size * call.num_directions

    def reserve(call, num_tokens, itemsize):
        masks = call.num_layers - 1 if call.dropout > 0 else 0
        kept_bytes = call.num_layers * kept[call.kind] * itemsize
        return units(call, num_tokens) * (kept_bytes + masks) if call.train else 0

    def worked_in(call, num_tokens, batch_size, dtype):
        return units(call, num_tokens) * (gates[call.kind] + 2) * dtype.itemsize

    monkeypatch.setattr(rnn, "rnn_kernels", with_padding)
    monkeypatch.setattr(rnn, "reserve_bytes", reserve)
    monkeypatch.setattr(rnn, "workspace_bytes", worked_in)
