"""TensorDiff: compares the live storages at points of a program."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from memcallback.core.code_lines import CodeLine, is_library, line_at
from memcallback.core.document import Document, Printable
from memcallback.core.torch_private import storage_id
from memcallback.core.validation import described
from memcallback.core.weak_list import WeakList
from memcallback.devices.local import default_device
from memcallback.devices.memory import resident_bytes
from memcallback.devices.meters import AllocatorMeter, MeterUnavailableError
from memcallback.diagnose.tensors.change import TensorChange, TensorGroup, TensorMark
from memcallback.diagnose.tensors.ledger import Creation, TensorLedger
from memcallback.diagnose.tensors.live import LiveTensor, live_storages
from memcallback.diagnose.tensors.saved import READS_SAVED
from memcallback.diagnose.tensors.variables import is_of_memcallback, stack

_T = TypeVar("_T")
_Reference = weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A storage at a mark; `creation` is None if the ledger did not see it."""

    reference: _Reference
    live: LiveTensor
    creation: Creation | None


class TensorDiff(Printable):
    """Shows which storages appeared and vanished between points of a program, and who owns them.

    A point is a call of `mark`, or the beginning or end of a `with` block. It also records the
    device's memory. Between points nothing happens unless `ledger` is on, and nothing is kept
    alive: neither tensors nor the model.

    Storages are found through all objects that Python knows, and from PyTorch 2.11 on through what
    autograd saved for the backward pass. The rest of the allocator's memory is shown as
    unattributed. Storages are compared by identity: one that reuses an old address counts as new.

    Args:
        model: The model or models that name parameters, gradients and saved tensors; by default
            models in variables of the running functions.
        optimizer: The optimizer or optimizers that name optimizer state; by default those in
            variables.
        device: The device; by default the model's, else the current accelerator, else the CPU.
        ledger: Also record every operator inside `with` blocks through a dispatch mode. Then each
            storage has the operator and the line that created it, and storages that only C++ holds
            are found too. This takes time. Under a dispatch mode PyTorch does less in place and
            computes a few derivatives by other formulas, so the last bits of results can differ.
            PyTorch 2.6 cannot run `torch.cond` and similar operators under a dispatch mode, and
            raises NotImplementedError.

    Attributes:
        changes: The changes from each mark to the next; for the first mark, only the totals.

    Raises:
        TypeError: If `model` is not one or several modules, or `optimizer` not one or several
            optimizers.

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
        self._modules = WeakList(modules)
        self._optimizers = WeakList(_several("optimizer", optimizer, torch.optim.Optimizer))
        self._device = torch.device(device) if device is not None else default_device(modules)
        self._meter = _meter(self._device)
        self._has_ledger = ledger
        self._ledger: TensorLedger | None = None
        self._open: ExitStack | None = None
        self._known: dict[int, _Known] = {}
        self.changes: tuple[TensorChange, ...] = ()

    def mark(self, label: str = "") -> TensorChange:
        """Record this point of the program.

        Args:
            label: A name for the point.

        Returns:
            The storages that appeared and vanished since the last mark; at the first mark, only the
            totals.

        Raises:
            TypeError: If the label is not a string.
            RuntimeError: If the ledger is on and the mark is outside of a `with` block.
        """
        if not isinstance(label, str):
            raise TypeError(
                f"label must be a string, got {described(label)}. Write mark('after forward'), or "
                "mark() without one."
            )
        if self._has_ledger and self._open is None:
            raise RuntimeError(
                "This mark is outside of `with diff:`, but the ledger records inside only. Put the "
                "marks into the block, or leave out ledger=True."
            )
        return self._mark(label)

    def __enter__(self) -> TensorDiff:
        if self._open is not None:
            raise RuntimeError(
                "This TensorDiff is in a `with` block already. Create another one for an inner "
                "block, or call mark() there."
            )
        self._mark("")
        with ExitStack() as opened:
            if self._has_ledger:
                self._ledger = TensorLedger(self._device, self._modules)
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
            device_name=self._device_name(),
            notes=self._notes(),
        )
        self._known = known
        self.changes += (change,)
        return change

    def _device_name(self) -> str:
        if self._meter is not None:
            return self._meter.device_name
        return "CPU" if self._device.type == "cpu" else str(self._device)

    def _look(self, frames: list[FrameType]) -> dict[int, _Known]:
        """All live storages: found before, recorded by the ledger, or found now."""
        known = {
            key: updated
            for key, earlier in self._known.items()
            if (updated := _updated(earlier)) is not None
        }
        creations = self._ledger.creations if self._ledger else {}
        for key, creation in creations.items():
            if key not in known or known[key].reference() is not creation.reference():
                known[key] = _Known(
                    reference=creation.reference, live=_live(creation), creation=creation
                )
        frames = sorted(frames, key=lambda frame: is_library(frame.f_code.co_filename))
        for live, reference in live_storages(
            [*self._modules], [*self._optimizers], None, self._device, frames=frames
        ):
            storage = reference()
            if storage is None:
                continue
            key = storage_id(storage)
            earlier = known.get(key)
            is_same = earlier is not None and earlier.reference() is storage
            known[key] = (
                replace(earlier, live=live)
                if earlier is not None and is_same
                else _Known(reference=reference, live=live, creation=None)
            )
        return known

    def _read(self, label: str, at: CodeLine, known: Mapping[int, _Known]) -> TensorMark:
        mark = TensorMark(
            label=label,
            at=at,
            known_bytes=sum(storage.live.size_bytes for storage in known.values()),
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
                "A CPU has no allocator statistics, so storages that are not found are not counted."
            )
        if not READS_SAVED and not self._ledger:
            notes.append(
                f"PyTorch {torch.__version__} does not show what autograd saved for the backward "
                "pass, so that is missing: use PyTorch 2.11 or later, or TensorDiff(ledger=True)."
            )
        return tuple(notes)

    def document(self) -> Document:
        """All changes."""
        return Document(*(change.document() for change in self._shown))

    def to_dict(self) -> dict[str, Any]:
        """All changes as plain data for JSON, with the unit in every key."""
        return {"changes": [change.to_dict() for change in self.changes]}

    @property
    def _shown(self) -> tuple[TensorChange, ...]:
        """All changes but that of the first mark, which the next one contains."""
        return self.changes[1:] or self.changes


def _several(name: str, value: Any, kind: type[_T]) -> list[_T]:
    """One object of a kind, or an iterable of them, as a list."""
    members = [] if value is None else [value] if isinstance(value, kind) else value
    wrong = value
    if isinstance(members, Iterable) and not isinstance(members, (str, bytes)):
        members = list(members)
        others = [member for member in members if not isinstance(member, kind)]
        if not others:
            return members
        wrong = others[0]
    kind_name = "torch.nn.Module" if kind is torch.nn.Module else "torch.optim.Optimizer"
    raise TypeError(
        f"{name} must be a {kind_name} or several of them, got {described(wrong)}. Leave it out to "
        "use those in variables."
    )


def _meter(device: torch.device) -> AllocatorMeter | None:
    """A meter for the device's allocator; None if it has none that can be read."""
    if device.type == "cpu":
        return None
    try:
        return AllocatorMeter(device, reset_peaks=False)
    except MeterUnavailableError:
        return None


def _updated(known: _Known) -> _Known | None:
    """A known storage with its current size and address; None if it is gone."""
    storage = known.reference()
    if storage is None or not storage.nbytes():
        return None
    return replace(
        known, live=replace(known.live, size_bytes=storage.nbytes(), address=storage.data_ptr())
    )


def _live(creation: Creation) -> LiveTensor:
    """Describe a storage that only the ledger knows."""
    storage = creation.reference()
    return LiveTensor(
        size_bytes=0 if storage is None else storage.nbytes(),
        shape=creation.shape,
        dtype=creation.dtype,
        category=None,
        owner="",
        module=creation.module,
        address=0 if storage is None else storage.data_ptr(),
    )


def _without(storages: Mapping[int, _Known], others: Mapping[int, _Known]) -> list[_Known]:
    """The storages that are not among others, or have another size there."""
    # An identity can be reused, so the references decide.
    return [
        storage
        for key, storage in storages.items()
        if (other := others.get(key)) is None
        or other.reference is not storage.reference
        or other.live.size_bytes != storage.live.size_bytes
    ]


def _groups(storages: Iterable[_Known]) -> tuple[TensorGroup, ...]:
    """Group storages by shape, dtype, line and category (without one, by owner or operator)."""
    grouped: dict[tuple[object, ...], list[_Known]] = {}
    for storage in storages:
        live, creation = storage.live, storage.creation
        use = live.category or live.owner or (creation and creation.operator)
        key = (live.shape, live.dtype, live.size_bytes, use, creation and creation.at)
        grouped.setdefault(key, []).append(storage)
    groups = [
        TensorGroup(
            count=len(members),
            shape=members[0].live.shape,
            dtype=members[0].live.dtype,
            size_bytes=sum(member.live.size_bytes for member in members),
            category=members[0].live.category,
            owners=tuple(sorted(set(filter(None, map(_owner_of, members))))),
            modules=tuple(
                sorted({module for module in map(_module_of, members) if module is not None})
            ),
            made_at=None if members[0].creation is None else members[0].creation.at,
        )
        for members in grouped.values()
    ]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes))


def _owner_of(storage: _Known) -> str:
    live, creation = storage.live, storage.creation
    if creation is None:
        return live.owner
    module = f" in {creation.module}" if creation.module else ""
    if not live.owner:
        return f"made by {creation.operator}{module}"
    return live.owner if live.module is not None or not module else f"{live.owner}, made{module}"


def _module_of(storage: _Known) -> str | None:
    if storage.live.module is None and storage.creation is not None:
        return storage.creation.module
    return storage.live.module
