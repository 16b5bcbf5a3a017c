"""Which lines of a program put something into a variable or an attribute: where a container is filled that grows."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from functools import cache
from pathlib import Path

#: Methods with which a container takes something.
_TAKING = frozenset({"append", "appendleft", "extend", "extendleft", "add", "insert", "put", "update", "setdefault"})


def filling_lines(name: str, paths: Iterable[str], *, within: Iterable[tuple[str, int, int]] | None = None) -> list[str]:
    """Find the lines that fill a container or add to a value.

    Args:
        name: What the container is called: `losses`, or the way to it, `history.losses`, of which the last part counts.
        paths: Source files.
        within: Parts of these, as path, first and last line; None for all.

    Returns:
        Each as `train.py:12: losses.append(loss)`, in the order of the files; none where a source cannot be read.
    """
    last = name.rpartition(".")[2]
    found: list[str] = []
    parts = None if within is None else list(within)
    for path in dict.fromkeys(paths):
        numbers = sorted({line for line, target in _fillings("".join(linecache.getlines(path))) if target == last})
        if parts is not None:
            numbers = [number for number in numbers if any(file == path and first <= number <= end for file, first, end in parts)]
        found += [f"{Path(path).name}:{number}: {linecache.getline(path, number).strip()}" for number in numbers]
    return found


@cache
def _fillings(source: str) -> tuple[tuple[int, str], ...]:
    """The lines in which something is put into a name, with that name."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        target: ast.expr | None = None
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKING:
            target = node.func.value
        elif isinstance(node, ast.AugAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            # `cache[key] = value`; `total = total + loss` and `cache = torch.cat([cache, new])`, which take the name itself.
            of_itself = [one for one in node.targets if _name(one) in {_name(part) for part in ast.walk(node.value)} - {""}]
            target = next((one for one in node.targets if isinstance(one, ast.Subscript)), None) or next(iter(of_itself), None)
        if target is not None and (name := _name(target)):
            found.append((line, name))
    return tuple(found)


def _name(node: ast.AST) -> str:
    """The variable or attribute of an expression such as `losses`, `self.losses`, `self.losses["train"]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
