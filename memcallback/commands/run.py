"""The command that runs a program and reports on its memory: run."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memcallback.commands.main_program import MainProgram, of_program
from memcallback.step.importer import UsageError

if TYPE_CHECKING:
    from memcallback.record.found_loop import FoundLoop


def add_run(commands: Any) -> None:
    """Add `run` with its arguments."""
    parser = commands.add_parser(
        "run",
        help="run a training script as it is, and report on its memory",
        usage="memcallback run [-h] [--log-dir DIR] (script.py | -m module) [arguments ...]",
        description="Run a program as python does, record the memory of its training steps, and "
        "explain an out-of-memory error. Reports go to stderr.",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="write a TensorBoard run and the memory page there (a Lightning Trainer has its own "
        "folder); by default nothing is written",
    )
    parser.add_argument(
        "-m",
        dest="module",
        metavar="module",
        nargs=argparse.REMAINDER,
        help="run a module, as python -m does; what follows are its arguments",
    )
    parser.add_argument(
        "script",
        metavar="script.py",
        nargs=argparse.REMAINDER,
        help="the script; what follows are its arguments",
    )
    parser.set_defaults(command=_run_program)


def _run_program(arguments: argparse.Namespace) -> int:
    try:
        program = _program(arguments.module, arguments.script)
    except UsageError:
        raise
    except Exception as error:  # of a package around the module: the program's own
        sys.excepthook(type(error), error.with_traceback(of_program(error)), error.__traceback__)
        return 1
    os.environ.setdefault("MEMCALLBACK", "1")  # for Lightning's Trainer, here and in its ranks
    recording = _Recording(arguments.log_dir)
    if "torch" in sys.modules:  # by what Python runs at its start
        recording.begin()
    else:
        sys.meta_path.insert(0, _AfterImport("torch", recording.begin))
    try:
        return program.run(recording.failed)
    finally:
        recording.close_at_end()


def _program(module: Sequence[str] | None, script: Sequence[str]) -> MainProgram:
    if module:
        name, *rest = module
        try:
            # argparse ends an option's arguments at --, and gives the script what follows.
            return MainProgram.module(name, [*rest, *script])
        except (ImportError, ValueError) as error:
            if not _is_about(name, error):
                raise
            raise UsageError(
                f"{error}. Name one that python -m would run, in this folder or installed."
            ) from None
    if script[:1] == ["--"]:
        script = script[1:]
    if not script:
        raise UsageError(
            "run needs a script or -m and a module, such as memcallback run train.py --epochs 3."
        )
    path, *rest = script
    try:
        return MainProgram.script(path, rest)
    except OSError as error:
        raise UsageError(
            f"{path!r} cannot be read: {error.strerror or error}. Name the file that python would "
            "run, such as train.py."
        ) from None


def _is_about(name: str, error: Exception) -> bool:
    """Whether an error says that there is no such module, and not that one of a program fails."""
    if of_program(error) is None:
        return True
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing is not None and f"{name}.".startswith(f"{missing}.")


class _Recording:
    """What `run` records: nothing until the program has imported PyTorch."""

    def __init__(self, log_dir: str | None) -> None:
        self._log_dir = log_dir
        self._loop: FoundLoop | None = None
        self._pid = os.getpid()

    def begin(self) -> None:
        from memcallback.record.found_loop import FoundLoop

        self._loop = FoundLoop(self._log_dir)

    def failed(self, error: BaseException) -> None:
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.failed(error)

    def close_at_end(self) -> None:
        """Close it once the program's threads have ended, which may still train."""
        # Python waits for these before it calls what is registered, and ends those that wait for
        # the main thread's end or for work: to join them here could take for ever.
        if any(not thread.daemon for thread in _other_threads()):
            atexit.register(self.close)
        else:  # now, since not everything can be written while Python ends
            self.close()

    def close(self) -> None:
        if os.getpid() != self._pid:  # a child that the program has forked
            return
        if self._loop is None:
            _say("the program did not use PyTorch.")
            return
        with suppress(Exception):  # whatever the program did to us, it ends as it would
            self._loop.close()
        if not self._loop.has_begun and not self._loop.is_lightning:
            _say(
                "no training step was seen. A step is seen if a module that an optimizer trains is "
                "called in training mode. If your loop makes no such call, record it with "
                "MemoryRecorder."
            )


def _other_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread is not threading.current_thread()]


def _say(text: str) -> None:
    """Print a line on stderr, unless the program has closed it."""
    if sys.stderr is not None:
        with suppress(ValueError, OSError):
            print(f"memcallback: {text}", file=sys.stderr)


class _AfterImport(MetaPathFinder):
    """Calls a function once a module is imported; the program may set up what it reads before."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        specs = (
            other.find_spec(fullname, path, target)
            for other in others
            if hasattr(other, "find_spec")  # Python passes over those without, too
        )
        spec = next((spec for spec in specs if spec is not None), None)
        # Many ask where a module is and do not import it, so each answer is prepared.
        if spec is not None and spec.loader is not None:
            self._run_after(spec.loader)
        return spec

    def _run_after(self, loader: Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            with suppress(Exception):  # the program goes on without a report
                self._function()

        loader.exec_module = exec_module  # type: ignore[method-assign]
