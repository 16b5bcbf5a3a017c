"""PyTorch's private parts: used in few places, and none of them is needed to train or to record."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from needs import needs_global_hooks

import memcallback as mc
from memcallback.core import torch_private

PACKAGE = Path(mc.__file__).parent
TESTS = Path(__file__).parents[1]
#: Where private names of PyTorch may stand.
PLACES = ("core/torch_private", "trace/patches/", "step/fake_world")
#: How many processes try the parts; each imports PyTorch and Lightning.
NUM_SHARES = 2


@functools.cache
def modules():
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@functools.cache
def private_names(source):
    """Dotted names of PyTorch with a private part in them; operators are named as they are."""
    tree = ast.parse(source)
    names, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = full
                found.add(full)
    for node in ast.walk(tree):
        first, *rest = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
        if first in names and all(part.isidentifier() for part in rest):
            found.add(".".join([names[first], *rest]))
    return {
        name
        for name in found
        if name.startswith("torch.") and is_private(name) and not name.startswith("torch.ops.")
    }


def longest(names):
    """The names that are no beginning of another one."""
    return sorted(n for n in names if not any(o.startswith(f"{n}.") for o in names))


def misplaced(sources):
    return sorted(
        (module, name)
        for module, source in sources.items()
        if not module.startswith(PLACES)
        for name in private_names(source)
    )


#: Private attributes of PyTorch's objects for which `torch_private` has functions.
ATTRIBUTES = {"_cdata", "_schema", "_sequence_nr", "_is_view"}


def parts():
    """Every private name that the package uses, as a dotted path."""
    looked_up = {part.path for part in torch_private.PARTS.values()}
    patched = {
        name.partition(".__")[0]
        for module, source in modules().items()
        if module.startswith(PLACES[1:])
        for name in private_names(source)
    }
    return longest(looked_up | patched)


def test_private_names_of_pytorch_are_in_few_places():
    assert misplaced(modules()) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch._C import _get_nested_int", "torch._C._get_nested_int"),
        (
            "import torch\ndef f():\n    torch._C._current_autograd_node()",
            "torch._C._current_autograd_node",
        ),
        (
            "from torch.utils import _pytree as pytree\npytree.tree_map",
            "torch.utils._pytree.tree_map",
        ),
    ],
)
def test_a_private_name_elsewhere_is_found(line, name):
    assert ("core/units", name) in misplaced(modules() | {"core/units": line})


def test_storages_schemas_and_nodes_are_asked_through_one_module():
    for module, source in modules().items():
        if not module.startswith(PLACES):
            used = {
                node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
            }
            assert not used & ATTRIBUTES, module


#: What only builds for CUDA have.
OF_CUDA = {"is_memory_history_on", "attach_oom_observer"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_global_hooks if name == "has_any_global_hook" else ())
        for name in sorted(set(torch_private.PARTS) - OF_CUDA)
    ],
)
def test_every_part_is_there_in_this_pytorch(name):
    assert getattr(torch_private, name) is resolve_name(torch_private.PARTS[name].path)


def test_a_part_that_is_missing_can_be_imported_and_says_what_it_is_when_it_is_used(monkeypatch):
    from torch._subclasses import fake_tensor

    monkeypatch.delitem(vars(torch_private), "FakeTensor", raising=False)
    monkeypatch.delattr(fake_tensor, "FakeTensor")
    missing = torch_private.FakeTensor
    monkeypatch.delitem(vars(torch_private), "FakeTensor")
    assert not isinstance(torch.ones(1), missing)
    assert issubclass(type("Own", (missing,), {}), missing)
    message = (
        rf"PyTorch {torch.__version__} has no torch\._subclasses\.fake_tensor\.FakeTensor \(needed "
        r"for predictions\)"
    )
    with pytest.raises(mc.PredictionError, match=message.replace("+", r"\+")):
        missing()
    with pytest.raises(mc.PredictionError, match=message.replace("+", r"\+")):
        _ = missing.anything


@pytest.mark.parametrize("share", range(NUM_SHARES))
def test_without_any_one_part_training_is_the_same_and_recorded(share, tmp_path):
    mine = parts()[share::NUM_SHARES]
    script = [sys.executable, str(TESTS / "without_a_part.py"), str(tmp_path / "said"), *mine]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    lines = (tmp_path / "said").read_text().splitlines()
    said = {one["part"]: one for one in map(json.loads, lines)}
    assert sorted(said) == sorted(mine), done.stderr[-2000:]
    for part, one in said.items():
        if one["torch_needs_it"]:
            continue
        assert "failed" not in one, f"{part}: {one['failed']}"
        assert one["is_same"], part
        assert one["num_recorded"] == [3, 3], f"{part}: {one['warnings']}"
        if not one["is_predicted"]:
            assert any(part.split(".")[-1] in text for text in one["warnings"]), (
                f"{part}: {one['warnings']}"
            )


def test_without_the_parts_of_a_history_there_is_none_and_a_warning(monkeypatch):
    from memcallback.record import oom_response

    part = torch_private.PARTS["is_memory_history_on"]
    monkeypatch.setattr(oom_response, "is_memory_history_on", torch_private._stand_in(part))
    with pytest.warns(mc.MemoryWarning, match="_cuda_isHistoryEnabled"):
        assert oom_response.record_history(torch.device("cuda")) is None
