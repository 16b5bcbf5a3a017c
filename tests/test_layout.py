"""The folders of ARCHITECTURE.md: what each may import, and what works where torch is not
installed.
"""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from slow_files import SLOW_FILES

import memcallback

PACKAGE = Path(memcallback.__file__).parent

#: The folders whose modules a folder's own may import, besides each other. `cuda` is for `trace`
#: alone, `trace` for `prediction`.
MAY_IMPORT = {
    "core": "",
    "isolation": "core",
    "devices": "core",
    "step": "core isolation",
    "cuda": "core devices",
    "trace": "core devices step cuda",
    "page": "core",
    "prediction": "core isolation devices step trace page",
    "batch_size": "core isolation devices step prediction",
    "savings": "core isolation devices step page prediction batch_size",
    "report": "core page prediction batch_size savings",
    "diagnose": "core devices step page prediction savings",
    "record": "core isolation devices step page prediction batch_size savings report diagnose",
    "integrations": "core isolation devices step prediction batch_size savings report diagnose "
    "record",
    "commands": "core isolation devices step prediction batch_size savings record",
    "cli": "core step commands",
    "__main__": "cli",
    "__init__": "core isolation devices step prediction batch_size savings diagnose record "
    "integrations",
}
SHOWN = {
    "torch.utils.tensorboard",
    "tensorboard",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "matplotlib",
}
#: The only folders that may import what shows results and what runs a training.
MAY_IMPORT_SHOWN = {"report", "integrations"}
#: What works without torch: the vocabulary, the simulated allocator, and all that `import
#: memcallback` loads.
PLAIN = ("core/", "prediction/allocator/")
NOT_PLAIN = ("core/tensors", "core/torch_private")
HEAVY = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "numpy",
    "tensorboard",
    "matplotlib",
    "psutil",
    "pynvml",
}


def sources():
    """The modules: path in the package without its suffix -> source."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


@cache
def imports(source):
    """Every name that a source imports, wherever it does, with its module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own(imported, known):
    """The module of the package that an import names; None if it is of another package."""
    first, *parts = imported.split(".")
    if first != "memcallback":
        return None
    while parts:
        for name in ("/".join(parts), "/".join([*parts, "__init__"])):
            if name in known:
                return name
        parts.pop()
    return "__init__"


def is_plain(name):
    return name.startswith(PLAIN) and name not in NOT_PLAIN


def violations(sources):
    """What breaks the layout, one sentence each."""
    found = []
    for name, source in sources.items():
        folder = name.split("/")[0]
        if folder not in MAY_IMPORT:
            found.append(f"{name} has no place in the layout")
            continue
        if name.endswith("/__init__") and [type(part) for part in ast.parse(source).body] != [
            ast.Expr
        ]:
            found.append(f"{name} holds more than a docstring")
        for imported in imports(source):
            other = own(imported, sources)
            if other is not None and other != "__init__":
                target = other.split("/")[0]
                if target != folder and target not in MAY_IMPORT[folder].split():
                    found.append(f"{name} imports {other}, and {folder} may not import {target}")
            if folder not in MAY_IMPORT_SHOWN and any(
                f"{imported}.".startswith(f"{shown}.") for shown in SHOWN
            ):
                found.append(
                    f"{name} imports {imported}, which is for "
                    f"{' and '.join(sorted(MAY_IMPORT_SHOWN))}"
                )
            if is_plain(name) and imported.split(".")[0] in HEAVY:
                found.append(f"{name} imports {imported}, and works without it")
    graph = {
        name: {
            other
            for imported in imports(source)
            if (other := own(imported, sources)) not in (None, "__init__", name)
        }
        for name, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' -> '.join(error.args[1])}")
    return found


def test_every_module_imports_only_what_its_folder_may():
    assert violations(sources()) == []


def test_every_folder_is_in_the_layout():
    assert set(MAY_IMPORT) == {name.split("/")[0] for name in sources()}


def test_the_engine_is_sealed():
    assert [folder for folder, may in MAY_IMPORT.items() if "cuda" in may.split()] == ["trace"]
    assert [folder for folder, may in MAY_IMPORT.items() if "trace" in may.split()] == [
        "prediction"
    ]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "core/units",
            "from memcallback.record.recorder import MemoryRecorder",
            "core/units imports record/recorder, and core may not import record",
        ),
        (
            "savings/segments",
            "from memcallback import trace",
            "savings/segments imports trace/__init__, and savings may not import trace",
        ),
        (
            "prediction/predict",
            "def f():\n    from memcallback.cuda import rules",
            "prediction/predict imports cuda/rules, and prediction may not import cuda",
        ),
        (
            "core/units",
            "def f():\n    import torch",
            "core/units imports torch, and works without it",
        ),
        (
            "prediction/allocator/host",
            "from torch import nn",
            "prediction/allocator/host imports torch.nn, and works without it",
        ),
        (
            "diagnose/health/watch",
            "from torch.utils.tensorboard import SummaryWriter",
            "diagnose/health/watch imports torch.utils.tensorboard.SummaryWriter, which is for "
            "integrations and report",
        ),
        (
            "step/ranks",
            "import lightning.pytorch",
            "step/ranks imports lightning.pytorch, which is for integrations and report",
        ),
        ("helpers", "", "helpers has no place in the layout"),
        ("core/__init__", '"""Words."""\nimport os', "core/__init__ holds more than a docstring"),
        (
            "core/types",
            "from memcallback.core.allocation_trace import Alloc",
            "a cycle: core/types -> core/allocation_trace -> core/types",
        ),
    ],
)
def test_the_check_finds(name, line, message):
    assert message in violations(sources() | {name: line})


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys({heavy!r}))  # as if they were not installed
import memcallback
assert memcallback.format_bytes(123 * 2**20) == "123.00 MiB"
assert memcallback.Phase.FORWARD.label == "forward"
import {plain}
import memcallback.cli
folders = tuple(f"{{m}}." for m in {heavy!r})
print("ok", len([name for name in sys.modules if name.startswith(folders)]))
"""


def test_the_plain_modules_work_where_torch_is_not_installed():
    plain = [
        f"memcallback.{name.replace('/', '.')}"
        for name in sources()
        if is_plain(name) and "__init__" not in name
    ]
    script = WITHOUT_TORCH.format(heavy=sorted(HEAVY), plain=", ".join(plain))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok 0\n", done.stderr


def test_every_public_name_is_there():
    for name in memcallback.__all__:
        assert getattr(memcallback, name) is not None
    assert sorted(memcallback.__all__) == memcallback.__all__


STAR = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {missing!r} else find(name, *more)
import memcallback
print(*sorted({{"MemoryTrainerCallback", "MemoryCallback", "predict"}} & {{*memcallback.__all__}}))
"""


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (["transformers"], "MemoryCallback predict"),
        (["transformers", "lightning", "pytorch_lightning"], "predict"),
    ],
    ids=["transformers", "Lightning too"],
)
def test_importing_all_names_leaves_out_those_whose_library_is_not_installed(missing, names):
    script = STAR.format(missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{names}\n", done.stderr


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = memcallback.nothing


def test_no_module_or_folder_takes_the_place_of_a_public_name():
    # Once a module is imported, it is an attribute of the package.
    assert not set(memcallback.__all__) & {path.stem for path in PACKAGE.iterdir()}


def test_every_file_that_is_listed_as_slow_is_there():
    tests = Path(__file__).parent
    assert [name for name in SLOW_FILES if not (tests / name).is_file()] == []
