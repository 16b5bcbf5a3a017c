"""Run a script or a module as Python itself does: as `__main__`, with its arguments and its end."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any


@dataclass(frozen=True)
class MainProgram:
    """A program that is about to run.

    Attributes:
        path: The absolute path of its file.
        folder: What Python puts first on the search path of modules.
        argv: `sys.argv`.
        spec: What the import system knows of a module; None for a script.
    """

    path: str
    folder: str
    argv: list[str]
    spec: ModuleSpec | None = None

    @classmethod
    def script(cls, path: str, arguments: list[str]) -> MainProgram:
        """The program that `python path` runs; an OSError if it cannot be read."""
        with io.open_code(os.path.abspath(path)):
            pass
        folder = os.path.dirname(os.path.realpath(path))
        return cls(os.path.abspath(path), folder, [path, *arguments])

    @classmethod
    def module(cls, name: str, arguments: list[str]) -> MainProgram:
        """The program that `python -m name` runs; a ModuleNotFoundError if there is none.

        The packages around it are imported, which can fail in any way.
        """
        folder = os.getcwd()
        _put_first(folder)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or spec.origin is None or not hasattr(spec.loader, "get_code"):
            raise ModuleNotFoundError(f"No module named {name!r} that can run", name=name)
        return cls(spec.origin, folder, [spec.origin, *arguments], spec)

    def run(self, on_error: Callable[[BaseException], None]) -> int:
        """Run it, and return its exit status; SystemExit and Ctrl-C go on.

        Any other error is printed by `sys.excepthook`, as Python would, without our frames;
        `on_error` is called before that.
        """
        sys.argv[:] = self.argv
        _put_first(self.folder)
        before = sys.modules["__main__"]  # alive, though nobody finds it any more
        main = ModuleType("__main__")
        loader = SourceFileLoader("__main__", self.path) if self.spec is None else self.spec.loader
        if "__annotations__" in vars(before):  # Python 3.14 puts none there
            main.__dict__.update(__annotations__={})
        main.__dict__.update(
            __package__=None if self.spec is None else self.spec.parent,
            __loader__=loader,
            __spec__=self.spec,
            __builtins__=builtins,
            __file__=self.path,
            __cached__=None if self.spec is None else self.spec.cached,
        )
        sys.modules["__main__"] = main
        code: CodeType | None = None
        try:
            code = self._code()
            exec(code, main.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            error.__traceback__ = _inside(code, error.__traceback__)
            with suppress(Exception):
                on_error(error)
            sys.excepthook(type(error), error, error.__traceback__)
            if isinstance(error, KeyboardInterrupt):
                # Python itself ends the process by the signal, and would print the error again.
                sys.excepthook = _print_nothing
                raise
            return 1
        del before
        return 0

    def _code(self) -> CodeType:
        if self.spec is not None:
            loader: Any = self.spec.loader
            code: CodeType = loader.get_code(self.spec.name)
            return code
        with io.open_code(self.path) as file:
            return compile(file.read(), self.path, "exec", dont_inherit=True)


def _put_first(folder: str) -> None:
    """Make a folder the first that Python searches for modules, as for a program of its own."""
    if not getattr(sys.flags, "safe_path", False):  # `python -P` puts none there
        sys.path[0] = folder


def of_program(error: BaseException) -> TracebackType | None:
    """The traceback from the program on, of an error while its packages were imported."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith(
        ("memcallback.", "importlib")
    ):
        traceback = traceback.tb_next
    return traceback


def _inside(code: CodeType | None, traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the program on; that of an error before it ran is empty."""
    while traceback is not None and traceback.tb_frame.f_code is not code:
        traceback = traceback.tb_next
    return traceback


def _print_nothing(*_: object) -> None:
    """As an excepthook."""
