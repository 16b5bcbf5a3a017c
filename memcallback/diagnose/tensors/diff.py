"""TensorDiff: which tensors came and went."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from memcallback.core.code_lines import CodeLine, is_library, line_at
from memcallback.core.document import Document, Printable
from memcallback.core.validation import described
from memcallback.devices.local import default_device
from memcallback.devices.memory import resident_bytes
from memcallback.devices.meters import AllocatorMeter, MeterUnavailableError
from memcallback.diagnose.tensors.change import TensorChange, TensorGroup, TensorMark
from memcallback.diagnose.tensors.ledger import Made, TensorLedger
from memcallback.diagnose.tensors.live import LiveTensor, live_storages
from memcallback.diagnose.tensors.saved import READS_SAVED
from memcallback.diagnose.tensors.variables import is_of_memcallback, stack

_T = TypeVar("_T")
_Reference = weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A storage at a mark."""

    reference: _Reference
    live: LiveTensor
    made: Made | None


class TensorDiff(Printable):
    """Tells which storages appeared and vanished between two points of a program, in any loop, with
    the device's memory at each.

    The points are calls of `mark`, and beginning and end of a `with` block. Nothing happens between
    them, and nothing is kept alive: not the tensors, and not the model.

    What is found is what Python knows, and from PyTorch 2.11 on what autograd saved for the
    backward pass; the rest of the allocator's memory is told as unattributed. Storages are told
    apart by identity, so another one at the same address is another one.

    Args:
        model: The model or models, for the names of parameters, gradients and saved tensors;
            without one, those in variables of the functions that run.
        optimizer: The optimizer or optimizers, for the names of their state; without one, those in
            variables.
        device: The device; by default the model's, else the current accelerator, else the CPU.
        ledger: Also follow every operator inside `with` blocks, through a dispatch mode: then each
            storage has the operator and the line that made it, and storages are seen that only C++
            holds. It costs time there, and under a dispatch mode PyTorch writes less in place and
            takes other formulas for a few derivatives, with which the last bits of results can
            differ. PyTorch 2.6 cannot run `torch.cond` and its like under a dispatch mode, and
            raises NotImplementedError there.

    Attributes:
        changes: What came and went from each mark to the next one; of the first mark, what was
            there.

    Raises:
        TypeError: If `model` is no module or `optimizer` no optimizer, or not several of them.

    Examples:
        >>> model = torch.nn.Linear(1000, 100)
        >>> diff = TensorDiff(model)
        >>> at_first = diff.mark()
        >>> loss = model(torch.ones(32, 1000)).sum()
        >>> loss.backward()
        >>> [group.owners for group in diff.mark("after backward").appeared][0]
        ('gradient of weight',)
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        device: torch.device | str | None = None,
        ledger: bool = False,
    ) -> None:
        modules = _several("model", model, torch.nn.Module)
        self._modules = [weakref.ref(module) for module in modules]
        self._optimizers = [
            weakref.ref(one) for one in _several("optimizer", optimizer, torch.optim.Optimizer)
        ]
        self._device = torch.device(device) if device is not None else default_device(modules)
        self._meter = _meter(self._device)
        self._has_ledger = ledger
        self._ledger: TensorLedger | None = None
        self._open: ExitStack | None = None
        self._known: dict[int, _Known] = {}
        self.changes: tuple[TensorChange, ...] = ()

    def mark(self, label: str = "") -> TensorChange:
        """Look at what is there now.

        Args:
            label: What to call this point.

        Returns:
            What came and went since the last mark; at the first one, what is there.

        Raises:
            TypeError: If the label is no text.
            RuntimeError: If there is to be a ledger, which there is in a `with` block only.
        """
        if not isinstance(label, str):
            raise TypeError(
                f"label must be a text, got {described(label)}. Write mark('after forward'), or mark() without one."
            )
        if self._has_ledger and self._open is None:
            raise RuntimeError(
                "This mark is outside of `with diff:`, and a ledger is kept inside only. Put the marks into the block, or leave out ledger=True."
            )
        return self._mark(label)

    def __enter__(self) -> TensorDiff:
        if self._open is not None:
            raise RuntimeError(
                "This TensorDiff is in a `with` block already. Make another one for a block inside, or call mark() there."
            )
        self._mark("")
        with ExitStack() as opened:
            if self._has_ledger:
                self._ledger = TensorLedger(self._device, _alive(self._modules))
                opened.enter_context(self._ledger.on())
            self._open = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        opened, self._open = self._open, None
        assert opened is not None
        opened.close()
        self._mark("end of the block")

    def _mark(self, label: str) -> TensorChange:
        frames = [
            frame
            for frame in stack(sys._getframe(1))
            if not is_of_memcallback(frame.f_code.co_filename)
        ]
        at = line_at(frames[0])
        known = self._look(frames)
        mark = self._read(label, at, known)
        change = TensorChange(
            before=self.changes[-1].after if self.changes else None,
            after=mark,
            appeared=_groups(_without(known, self._known)) if self.changes else (),
            vanished=_groups(_without(self._known, known)),
            device_name=self._meter.device_name
            if self._meter
            else "CPU"
            if self._device.type == "cpu"
            else str(self._device),
            notes=self._notes(),
        )
        self._known = known
        self.changes += (change,)
        return change

    def _look(self, frames: list[FrameType]) -> dict[int, _Known]:
        """All storages that are there: those that are found, those that the ledger saw being made,
        and those that were found before.
        """
        made = self._ledger.made if self._ledger else {}
        known = {key: now for key, one in self._known.items() if (now := _now(one)) is not None}
        for key, one in made.items():
            if key not in known or known[key].reference() is not one.reference():
                known[key] = _Known(reference=one.reference, live=_live(one), made=one)
        frames = sorted(frames, key=lambda frame: is_library(frame.f_code.co_filename))
        for live, reference in live_storages(
            _alive(self._modules), _alive(self._optimizers), None, self._device, frames=frames
        ):
            storage = reference()
            if storage is None:
                continue
            key = storage._cdata
            earlier = known.get(key)
            is_same = earlier is not None and earlier.reference() is storage
            known[key] = (
                replace(earlier, live=live)
                if earlier is not None and is_same
                else _Known(reference=reference, live=live, made=None)
            )
        return known

    def _read(self, label: str, at: CodeLine, known: Mapping[int, _Known]) -> TensorMark:
        mark = TensorMark(
            label=label,
            at=at,
            known_bytes=sum(one.live.size_bytes for one in known.values()),
            num_storages=len(known),
            resident_bytes=resident_bytes()[0] if self._device.type == "cpu" else None,
        )
        if self._meter is None:
            return mark
        self._meter.begin()
        self._meter.read(None)
        (stats,) = self._meter.end()
        return replace(
            mark,
            allocated_bytes=stats.allocated_bytes,
            requested_bytes=stats.requested_bytes,
            reserved_bytes=stats.reserved_bytes,
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self._device.type == "cpu":
            notes.append(
                "A CPU has no allocator that could be asked: storages that are not known do not count."
            )
        if not READS_SAVED and not self._ledger:
            notes.append(
                f"PyTorch {torch.__version__} tells nothing of what autograd saved for the backward pass, which is not in the table: "
                "use PyTorch 2.11 or later, or TensorDiff(ledger=True)."
            )
        return tuple(notes)

    def document(self) -> Document:
        """All changes."""
        return Document(*(change.document() for change in self._told))

    def to_dict(self) -> dict[str, Any]:
        """All changes as data that json writes, with the unit in every key."""
        return {"changes": [change.to_dict() for change in self.changes]}

    @property
    def _told(self) -> tuple[TensorChange, ...]:
        """The first mark is in the change that follows it."""
        return self.changes[1:] or self.changes


def _several(name: str, given: Any, kind: type[_T]) -> list[_T]:
    """One or several as a list."""
    several = [] if given is None else [given] if isinstance(given, kind) else given
    if isinstance(several, Iterable) and not isinstance(several, (str, bytes)):
        several = list(several)
        if all(isinstance(one, kind) for one in several):
            return several
    what = "torch.nn.Module" if kind is torch.nn.Module else "torch.optim.Optimizer"
    wrong = (
        given
        if not isinstance(several, list)
        else next(one for one in several if not isinstance(one, kind))
    )
    raise TypeError(
        f"{name} must be a {what} or several of them, got {described(wrong)}. Leave it out to have names from variables."
    )


def _alive(references: Iterable[Callable[[], _T | None]]) -> list[_T]:
    return [one for reference in references if (one := reference()) is not None]


def _meter(device: torch.device) -> AllocatorMeter | None:
    """What reads the device's allocator; None where there is none to be read."""
    if device.type == "cpu":
        return None
    try:
        return AllocatorMeter(device, reset_peaks=False)
    except MeterUnavailableError:
        return None


def _now(known: _Known) -> _Known | None:
    """What was known of a storage with the size that it has now; None if it is gone."""
    storage = known.reference()
    if storage is None or not storage.nbytes():
        return None
    return replace(
        known, live=replace(known.live, size_bytes=storage.nbytes(), address=storage.data_ptr())
    )


def _live(made: Made) -> LiveTensor:
    """What the ledger knows of a storage that nothing else knows."""
    storage = made.reference()
    return LiveTensor(
        size_bytes=0 if storage is None else storage.nbytes(),
        shape=made.shape,
        dtype=made.dtype,
        category=None,
        owner="",
        module=made.module,
        address=0 if storage is None else storage.data_ptr(),
    )


def _without(some: Mapping[int, _Known], others: Mapping[int, _Known]) -> list[_Known]:
    """Those storages that are not the same in the others: another one can have their number, and
    the same one another size.
    """
    found = []
    for key, one in some.items():
        other = others.get(key)
        if (
            other is None
            or other.reference is not one.reference
            or other.live.size_bytes != one.live.size_bytes
        ):
            found.append(one)
    return found


def _groups(storages: Iterable[_Known]) -> tuple[TensorGroup, ...]:
    """Storages of the same shape, type, category and line together; without a category, of the same
    owner.
    """
    grouped: dict[tuple[object, ...], list[_Known]] = {}
    for one in storages:
        made = one.made
        kind = one.live.category or one.live.owner or (made and made.operator)
        key = (one.live.shape, one.live.dtype, one.live.size_bytes, kind, made and made.at)
        grouped.setdefault(key, []).append(one)
    groups = [
        TensorGroup(
            count=len(alike),
            shape=alike[0].live.shape,
            dtype=alike[0].live.dtype,
            size_bytes=sum(one.live.size_bytes for one in alike),
            category=alike[0].live.category,
            owners=tuple(sorted(set(filter(None, map(_owner_of, alike))))),
            modules=tuple(
                sorted({module for module in map(_module_of, alike) if module is not None})
            ),
            made_at=None if alike[0].made is None else alike[0].made.at,
        )
        for alike in grouped.values()
    ]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes))


def _owner_of(known: _Known) -> str:
    live, made = known.live, known.made
    if made is None:
        return live.owner
    module = f" in {made.module}" if made.module else ""
    if not live.owner:
        return f"made by {made.operator}{module}"
    return live.owner if live.module is not None or not module else f"{live.owner}, made{module}"


def _module_of(known: _Known) -> str | None:
    return (
        known.made.module
        if known.live.module is None and known.made is not None
        else known.live.module
    )
