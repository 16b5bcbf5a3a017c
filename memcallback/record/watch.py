"""Finds steps and phases of a loop by hooks, and reports an error that ends the program."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from types import FrameType, TracebackType
from typing import Any

import torch

from memcallback.core.errors import fail_safe, faults_as_warnings, warn_and_go_on
from memcallback.core.phase_spans import begin_backward, begin_update, end_update
from memcallback.core.tensors import tensors_in
from memcallback.core.types import Phase
from memcallback.core.validation import whole_number
from memcallback.record.step_recorder import StepRecorder
from memcallback.step.batch import INFERRED, infer_batch_size
from memcallback.step.forward_hooks import ForwardHooks
from memcallback.step.hooks import Hook, listen, remove_hooks
from memcallback.step.sample_lists import MOST_OBJECTS

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ErrorHook:
    """An excepthook that tells one listener; another package may keep it in a chain of its own."""

    def __init__(self, listener: Callable[[BaseException], None]) -> None:
        self._listener = weakref.WeakMethod(listener)
        self._is_over = False
        self._before: _ExceptHook = sys.excepthook
        sys.excepthook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        listener = None if self._is_over else self._listener()
        # Whatever happens here, Ctrl-C too: the program ends with the error itself, printed below.
        with suppress(Exception, KeyboardInterrupt):
            if listener is not None:
                listener(error)
        self._before(kind, error, traceback)

    def end(self) -> None:
        """Tell nobody, and leave the process if no other package's hook is in between."""
        self._is_over = True
        while isinstance(hook := sys.excepthook, _ErrorHook) and hook._is_over:
            sys.excepthook = hook._before


def listen_for_errors(listener: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call a listener with the error that ends the program, before Python prints it.

    Returns a function that stops it.
    """
    return _ErrorHook(listener).end


#: Called before the first step begins, with the positional and the keyword arguments of the model.
FirstCall = Callable[[tuple[Any, ...], dict[str, Any]], None]
#: Longer collections among a model's arguments are not searched for tensors.
_MOST_ITEMS = 1_000


class Watch:
    """Marks a recorder's steps and phases until it is closed; `MemoryRecorder.watch` makes it.

    As a context manager it closes itself, and marks a step that an exception ends as interrupted.
    A step that the loop itself has begun (`with recorder.step(batch):`) stays one step; only its
    phases are marked.

    Attributes:
        is_over: Asked before each step whether the loop has ended; then the watch closes itself.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        batch_size: int | None = None,
        on_first_call: FirstCall | None = None,
    ) -> None:
        self._batch_size = (
            None if batch_size is None else whole_number("batch_size", batch_size, INFERRED)
        )
        self._recorder = weakref.ref(recorder)
        self._on_first_call = on_first_call
        self.is_over: Callable[[], bool] = lambda: False
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._is_broken = False
        self._has_seen_step = False
        # Replicas of a model (DataParallel) have its hooks, and run at the same time in threads.
        self._lock = threading.RLock()
        self._forget_step()
        handles: list[Any] = []
        for module in modules:
            begins, ends = _hook(self._forward_begins), _hook(self._forward_ends)
            handles.append(ForwardHooks(module, begins, ends))
        for optimizer in optimizers:
            handles.append(optimizer.register_step_pre_hook(_hook(self._update_begins)))
            handles.append(optimizer.register_step_post_hook(_hook(self._update_ends)))
        self._finalizer = weakref.finalize(
            self, _remove, handles, listen(self), listen_for_errors(self.failed)
        )

    def __enter__(self) -> Watch:
        if self._recorder() is None:
            raise RuntimeError(
                "The recorder of this watch is gone. Keep it: recorder = MemoryRecorder(...); with "
                "recorder.watch(): ..."
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                self.failed(error)
        finally:  # also after Ctrl-C in the report
            self.close()

    def failed(self, error: BaseException) -> None:
        """Report the error that ends the program, if memory ran out, and end the step."""
        recorder = self._recorder()
        try:
            if recorder is not None:
                with faults_as_warnings("The error that ended the training was not reported."):
                    recorder.failed(error)
        finally:
            self.end_step(is_interrupted=True)

    def close(self) -> None:
        """Remove the hooks and end the open step; a step with only a forward pass is dropped."""
        self.remove_hooks()
        self.give_up_step()

    def remove_hooks(self) -> None:
        """Remove the hooks alone."""
        self._finalizer()

    def forward_has_begun(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Begin a step with a call of a model that runs already, as its hook would have."""
        self._forward_begins(module, args, {})

    def give_up_step(self) -> None:
        """End the open step; a step with only a forward pass is dropped."""
        recorder = self._recorder()
        if self._owns_step and not self._is_used and recorder is not None:
            self._forget_step()
            recorder.drop_step()
        self.end_step()

    def end_step(self, *, is_interrupted: bool = False) -> None:
        """End the step before the next one begins; a step that the loop itself began goes on."""
        recorder = self._recorder()
        if self._owns_step and recorder is not None:
            # A failed update has no post hook, so its phase is still open.
            is_interrupted = is_interrupted or recorder.current_phase is Phase.OPTIMIZER_STEP
            self._forget_step()
            recorder.end_step(is_interrupted=is_interrupted)

    def _forget_step(self) -> None:
        self._owns_step = False
        self._is_used = False  # whether it had a backward pass or an update
        self._is_in_closure = False
        self._backward_depth = 0
        self._thread: int | None = None
        self._errors_before: dict[int, int] = {}
        self._updated: set[int] = set()
        # Weak: nobody else keeps these tensors as long as a recorder keeps the batch of its step.
        self._inputs: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._numbers = count()

    def _release(self) -> None:
        self._finalizer()
        recorder = self._recorder()
        if self._owns_step and recorder is not None:
            recorder.drop_step()
        self._forget_step()

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the step's: autograd's, or another model's."""
        return self._thread not in (None, threading.get_ident())

    @fail_safe
    def _forward_begins(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with self._lock_for(module):
            self._begin_forward(module, args, kwargs)

    def _lock_for(self, module: torch.nn.Module) -> AbstractContextManager[object]:
        """A lock for replicas; any other module must never wait."""
        return self._lock if _is_replica(module) else nullcontext()

    def _begin_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        recorder = self._recorder()
        is_training = module.training and torch.is_grad_enabled()
        # Checkpointing calls modules inside the backward pass.
        if recorder is None or not is_training or self._backward_depth or self._is_elsewhere():
            return
        if (self._owns_step or not recorder.is_in_step) and self.is_over():
            self.close()
            return
        if self._owns_step and self._is_used and not self._is_in_closure:
            self.end_step()
        if id(module) in self._errors_before and not _is_in_forward(module):
            # Ctrl-C has ended its last call: PyTorch calls no hook then.
            self.end_step(is_interrupted=True)
        if not recorder.is_in_step:
            self._begin_step(recorder, module, args, kwargs)
        if self._owns_step:
            self._errors_before[id(module)] = id(sys.exc_info()[1])
            tensors = tensors_in((_small(args), _small(kwargs)), most=MOST_OBJECTS)
            self._inputs.update(
                (next(self._numbers), tensor) for tensor in tensors if not tensor.requires_grad
            )
        if recorder.current_phase is not Phase.FORWARD:
            recorder.open_phase(Phase.FORWARD)

    def _begin_step(
        self,
        recorder: StepRecorder,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        small = [*_small(args), *_small(kwargs).values()]
        batch = small[0] if len(small) == 1 else small
        if not self._has_seen_step and self._on_first_call is not None:
            self._on_first_call(args, kwargs)
        is_in_closure = self._is_in_closure
        self._forget_step()
        self._owns_step = self._has_seen_step = True
        self._is_in_closure = is_in_closure
        # After replicas another thread goes on.
        self._thread = None if _is_replica(module) else threading.get_ident()
        recorder.begin_step(
            self._inputs,
            batch_size=self._batch_size or infer_batch_size(batch).batch_size,
            called=module,
        )

    @fail_safe
    def _forward_ends(self, module: torch.nn.Module, *_: object) -> None:
        with self._lock_for(module):
            if self._errors_before.pop(id(module), id(sys.exc_info()[1])) != id(sys.exc_info()[1]):
                self.end_step(is_interrupted=True)

    @fail_safe
    def backward_begins(self) -> bool:
        """As `BackwardListener`."""
        recorder = self._recorder()
        if recorder is None or not recorder.is_in_step or self._is_elsewhere():
            return False
        self._backward_depth += 1
        if self._backward_depth == 1:
            begin_backward(recorder)
        return True

    @fail_safe
    def backward_ends(self, *, is_interrupted: bool) -> None:
        """As `BackwardListener`."""
        recorder = self._recorder()
        self._backward_depth = max(0, self._backward_depth - 1)
        if recorder is None or self._backward_depth:
            return
        self._is_used = True
        if is_interrupted:
            self.end_step(is_interrupted=True)
            return
        recorder.close_phase()
        if self._is_in_closure:
            recorder.open_phase(Phase.OPTIMIZER_STEP)

    @fail_safe
    def _update_begins(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        recorder = self._recorder()
        if recorder is None or self._backward_depth:
            return
        # The optimizer itself is the first of the arguments.
        is_in_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        if self._is_in_closure or (is_in_closure and id(optimizer) in self._updated):
            # The update before has failed; or its step is over, and this closure begins another.
            self.end_step()
        self._is_in_closure = is_in_closure
        if recorder.is_in_step:
            begin_update(recorder, is_manual=True)
        elif not is_in_closure and not self._has_seen_step:
            self._has_seen_step = True
            warn_and_go_on(
                "An optimizer made an update, but no watched model was called in training mode: it "
                "may be in evaluation mode, compiled in place after the watch began, or called "
                "through another object. Watch the object that the loop calls, or put the body of "
                "the loop into `with recorder.step(batch):`."
            )

    @fail_safe
    def _update_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        recorder = self._recorder()
        self._is_in_closure = False
        if recorder is None or self._backward_depth or not recorder.is_in_step:
            return
        end_update(recorder, is_manual=False)
        self._is_used = True
        self._updated.add(id(optimizer))
        if self._updated >= self._optimizers:
            self.end_step()


def _is_in_forward(module: torch.nn.Module) -> bool:
    """Whether a module that is called has called itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def _is_replica(module: torch.nn.Module) -> bool:
    return getattr(module, "_is_replica", False)


def _hook(method: Callable[..., None]) -> Hook:
    """A hook with a weak reference to the method that it calls."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        if (target := reference()) is not None:
            target(*args)

    return Hook(call)


def _small(arguments: Any) -> Any:
    """The arguments without long collections: searching these for tensors would cost time."""
    if isinstance(arguments, dict):
        return {name: value for name, value in arguments.items() if not _is_long(value)}
    return [value for value in arguments if not _is_long(value)]


def _is_long(argument: object) -> bool:
    return isinstance(argument, (list, tuple, dict, set, frozenset)) and len(argument) > _MOST_ITEMS


def _remove(handles: Iterable[Any], *end_listening: Callable[[], None]) -> None:
    remove_hooks(handles)
    for end in end_listening:
        end()
