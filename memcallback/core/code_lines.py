"""Find the line of user code in a frame or traceback, and whom a file belongs to."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FrameType, TracebackType

_FRAMEWORKS = (
    "torch",
    "functorch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "memcallback",
)
_PACKAGES = ("site-packages", "dist-packages")
#: A line of a stack that `faulthandler` has dumped.
_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class CodeLine:
    """A line of a program.

    Attributes:
        file: The file's path: relative to the working directory if it is inside, from the package
            on if it is installed, else its folder and name.
        number: The line's number, from 1.
        function: The function around it, such as `training_step`; `<module>` outside functions.
        path: The file's path in Python.
    """

    file: str
    number: int
    function: str
    path: str

    @property
    def text(self) -> str:
        """The line's source; empty if the file cannot be read."""
        return linecache.getline(self.path, self.number).strip()

    def to_dict(self) -> dict[str, str | int]:
        """The line as JSON data."""
        return {
            "file": self.file,
            "line": self.number,
            "function": self.function,
            "text": self.text,
        }

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (
            "" if self.function == "<module>" else f" in {self.function}"
        )


def line_of(frame: FrameType | None) -> CodeLine | None:
    """The innermost line outside the frameworks, from a frame outwards; None if there is none."""
    while frame is not None:
        if not is_framework(frame.f_code.co_filename):
            return line_at(frame)
        frame = frame.f_back
    return None


def line_here() -> CodeLine | None:
    """The innermost running line outside the frameworks; None if there is none."""
    return line_of(sys._getframe(1))


def lines_inside(file: str) -> tuple[CodeLine | None, CodeLine | None]:
    """The innermost running line outside the frameworks, and that of the program itself.

    None where there is none among the frames that a function of `file` has called.
    """
    line, frame = None, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        path = frame.f_code.co_filename
        if not is_framework(path):
            line = line or line_at(frame)
            if not is_library(path):
                return line, line_at(frame)
        frame = frame.f_back  # type: ignore[assignment]  # typeshed: the first frame is never None
    return line, None


def own_line_here() -> CodeLine | None:
    """The innermost running line of the program, else of a library; None if there is neither."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return line_at(frame)
        frame = frame.f_back
    return line_of(sys._getframe(1))


def own_line_of_error(tb: TracebackType | None) -> CodeLine | None:
    """The innermost line of the program in a traceback; None if there is none."""
    own = [
        (frame, number)
        for frame, number in frames_of(tb)
        if not is_library(frame.f_code.co_filename)
    ]
    return line_at(*own[-1]) if own else None


def line_of_error(tb: TracebackType | None) -> CodeLine | None:
    """The innermost line outside the frameworks in a traceback; None if there is none."""
    own = [
        (frame, number)
        for frame, number in frames_of(tb)
        if not is_framework(frame.f_code.co_filename)
    ]
    return line_at(*own[-1]) if own else None


def own_line_in(dump: str) -> CodeLine | None:
    """The innermost line of the program, else of a library, in a stack of `faulthandler`."""
    lines = [
        CodeLine(_short_path(path), int(number), function, path)
        for path, number, function in _DUMPED.findall(dump)
        if not is_framework(path)
    ]
    return next((line for line in lines if not is_library(line.path)), lines[0] if lines else None)


def own_traceback(error: BaseException) -> str:
    """An error's traceback without the frameworks' lines; empty if there are no others."""
    whole = traceback.TracebackException.from_exception(error)
    for part in _chained(whole):
        own = [frame for frame in part.stack if not is_framework(frame.filename)]
        part.stack = traceback.StackSummary.from_list(own)
    return "".join(whole.format()) if whole.stack or isinstance(error, SyntaxError) else ""


def _chained(
    error: traceback.TracebackException | None,
) -> Iterator[traceback.TracebackException]:
    """An error with its causes."""
    if error is not None:
        yield error
        yield from _chained(error.__cause__)
        yield from _chained(error.__context__)


def frames_of(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback with their line numbers, outermost first."""
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


@cache
def is_framework(path: str) -> bool:
    """Whether a file is of Python, PyTorch, Lightning or memcallback, or generated code."""
    if path.startswith("<"):
        # Typed code and notebook cells are the user's. Other code without a file is generated, or
        # frozen into Python.
        return path != "<stdin>" and not path.startswith("<ipython-input")
    full = _absolute(path)
    files = tuple(getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS)
    if "/torchinductor_" in full or full.startswith(_folders_of(files)):
        return True
    return full.startswith(_python_folder()) and not _is_installed(full)


@cache
def is_library(path: str) -> bool:
    """Whether a file is of a framework or of another installed package, not the user's program."""
    return is_framework(path) or _is_installed(_absolute(path))


def _is_installed(full: str) -> bool:
    return any(f"{os.sep}{name}{os.sep}" in full for name in _PACKAGES)


@cache
def _folders_of(files: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in files if file)


@cache
def _python_folder() -> str:
    return sysconfig.get_paths()["stdlib"] + os.sep


def line_at(frame: FrameType, number: int | None = None) -> CodeLine:
    """The current line of a frame."""
    code = frame.f_code
    return CodeLine(
        _short_path(code.co_filename),
        frame.f_lineno if number is None else number,
        code.co_name,
        code.co_filename,
    )


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:  # a relative path, from a folder that is gone
        return path


@cache
def _short_path(path: str) -> str:
    """A file's path for people, as `CodeLine.file` has it."""
    full = _absolute(path)
    for name in _PACKAGES:
        _, found, after = full.partition(f"{os.sep}{name}{os.sep}")
        if found:
            return after
    try:
        here = os.getcwd() + os.sep
    except OSError:  # the folder is gone
        return path
    return full[len(here) :] if full.startswith(here) else os.sep.join(full.split(os.sep)[-2:])
