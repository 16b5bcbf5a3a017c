"""Docstrings: whole for public names, one line for everything else."""

import ast
import doctest
import io
import re
import sys
from pathlib import Path

import pytest

import memcallback

PACKAGE = Path(memcallback.__file__).parent
SECTIONS = re.compile(r"^\s*(Args|Returns|Raises|Yields):\s*$", re.MULTILINE)
#: Methods whose meaning Python or a base class fixes.
SPECIAL = re.compile(r"__\w+__")


def trees():
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


def public_classes(trees):
    """The public classes, those that they inherit from, and those that public functions return."""
    nodes = [node for tree in trees.values() for node in tree.body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    returned = [
        ast.unparse(node.returns)
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name in memcallback.__all__ and node.returns
    ]
    todo = [name for name in [*memcallback.__all__, *returned] if name in classes]
    found = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            bases = (ast.unparse(base).split("[")[0] for base in classes[name].bases)
            todo += [base for base in bases if base in classes]
    return found


def definitions(trees):
    """(file, node, whether it is public) of every function, method and class, nested ones too."""
    classes = public_classes(trees)

    def inside(file, parent, is_public):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                yield file, node, node.name in classes
                yield from inside(file, node, node.name in classes)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                at_top = isinstance(parent, ast.Module) and node.name in memcallback.__all__
                yield file, node, at_top or (is_public and not node.name.startswith("_"))
                yield from inside(file, node, False)
            else:
                yield from inside(file, node, is_public)

    for file, tree in trees.items():
        yield from inside(file, tree, False)


def faults(trees):
    """One sentence for each docstring that breaks the rule."""
    found = []
    for file, node, is_public in definitions(trees):
        text = ast.get_docstring(node)
        where = f"{file}:{node.lineno} {node.name}"
        if is_public and text is None and not SPECIAL.fullmatch(node.name):
            found.append(f"{where} is public and has no docstring")
        elif not is_public and text and SECTIONS.search(text):
            found.append(
                f"{where} is internal: one line says what it does, without Args and Returns"
            )
    return found


def test_public_names_have_docstrings_and_internal_ones_one_line():
    assert faults(trees()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            'def f(x):\n    """Do.\n\n    Args:\n        x: It.\n    """',
            "a.py:1 f is internal: one line says what it does, without Args and Returns",
        ),
        ("def predict(step): ...", "a.py:1 predict is public and has no docstring"),
        (
            'class Plan:\n    """A."""\n    def to_text(self): ...',
            "a.py:3 to_text is public and has no docstring",
        ),
    ],
)
def test_the_check_finds(source, fault):
    assert fault in faults({"a.py": ast.parse(source)})


def test_the_examples_of_public_names_run_and_print_what_they_show():
    pytest.importorskip("transformers")  # MemoryTrainerCallback
    values = [getattr(memcallback, name) for name in memcallback.__all__]
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    tests = [
        test
        for value in values
        if getattr(value, "__module__", "").startswith("memcallback")
        for test in finder.find(value, globs=dict(vars(sys.modules[value.__module__])))
    ]
    assert sum(len(test.examples) for test in tests) > 20
    output = io.StringIO()
    for test in tests:
        runner.run(test, out=output.write)
    assert runner.failures == 0, output.getvalue()
