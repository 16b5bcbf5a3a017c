"""Record the plan that cuDNN puts first for many convolutions, for several cards.

    PYTHONPATH=.:tests python tests/recorded/record_plans.py without
    PYTHONPATH=.:tests python tests/recorded/record_plans.py with       # on a machine with a device
    PYTHONPATH=.:tests python tests/recorded/record_plans.py hidden     # there, made invisible
    PYTHONPATH=.:tests python tests/recorded/record_plans.py handle --cards H200    # its own card

`--cards H200 H100` and `--questions again` or `trainings` ask about these cards alone, and about
another set of questions. For a Hopper GPU the knobs of a plan are recorded.
Most describe a card to cuDNN. `hidden` is for CUDA_VISIBLE_DEVICES="". `handle` asks as PyTorch
does, with cuDNN's handle of the device. tests/cuda/test_convolution_plans.py reads the files;
README.md beside this script tells the format.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from convolution_plans import CARDS, RECORDED, SETS, file_name, questions

from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.cudnn import Attribute, Kind, Type
from memcallback.cuda.convolution.stream_k import HOPPER
from memcallback.devices.catalogue import find_device

_HANDLE, _GRAPH_HANDLE = 0, 800
cudnn._C_TYPES[_HANDLE] = ctypes.c_void_p  # type: ignore[index]


@dataclass(frozen=True)
class ByHandle(workspace._Query):
    """Asks with cuDNN's handle of this machine's device, as PyTorch does."""

    handle: int = 0

    def _create(self, kind: int) -> int:
        made = super()._create(kind)
        if kind == Kind.GRAPH:
            self.library.set(made, _GRAPH_HANDLE, _HANDLE, self.handle)  # type: ignore[arg-type]
        return made

    def _for_device(self, descriptor: int, attribute: Attribute) -> None:
        """The graph has the handle, which names the device."""


def new_handle(library: cudnn.CuDNN) -> int:
    """cuDNN's handle of this machine's device."""
    handle = ctypes.c_void_p()
    status = library._library.cudnnCreate(ctypes.byref(handle))
    if status:
        raise cudnn.CuDNNError(f"cuDNN made no handle (status {status})")
    return int(handle.value or 0)


def first_plan(
    query: workspace._Query, convolution: Any, shape: Any, *, has_knobs: bool
) -> list[Any] | None:
    """The plan that PyTorch tries first: the engine's number, the workspace in bytes, knobs."""
    graph = query.graph(convolution, shape)
    for mode in (workspace._MODE_INSTANT, workspace._MODE_FALLBACK):
        for config in query.configs(graph, mode):
            engine = query.engine(config)
            if workspace._is_filtered(convolution, query.notes(engine)):
                continue
            size_bytes = query.library.get(config, Attribute.CONFIG_WORKSPACE, Type.INT64, 1)[0]
            knobs = [sorted(query.knobs(config).items())] if has_knobs else []
            return [query.number(engine), size_bytes, *knobs]
    return None


def main() -> None:
    """Record what cuDNN answers here."""
    parser = argparse.ArgumentParser(description="Record cuDNN's first plans.")
    parser.add_argument("way", choices=("with", "without", "hidden", "handle"))
    parser.add_argument("--out", type=Path, default=RECORDED)
    parser.add_argument("--cards", nargs="*", default=CARDS)
    parser.add_argument("--questions", choices=SETS, default=SETS[0])
    given = parser.parse_args()
    if given.way == "handle" and len(given.cards) != 1:
        parser.error("handle: name this machine's card with --cards")
    if (given.way in ("without", "hidden")) is torch.cuda.is_available():
        parser.error(
            f"{given.way}: PyTorch finds {'a' if torch.cuda.is_available() else 'no'} device"
        )
    if given.way == "hidden":
        ctypes.CDLL("libcuda.so.1")  # else nothing is hidden
    library = cudnn.load()
    if library is None:
        parser.error("no cuDNN is installed that answers without a device")
    handle = new_handle(library) if given.way == "handle" else 0
    for name in given.cards:
        card = find_device(name)
        answers = []
        has_knobs = card.compute_capability == HOPPER
        for convolution, shape in questions(given.questions):
            with ExitStack() as stack:
                query = (
                    ByHandle(library, stack, 0, handle)
                    if handle
                    else workspace._Query(library, stack, library.device(card))
                )
                answers.append(first_plan(query, convolution, shape, has_knobs=has_knobs))
        document = {
            "meta": {"card": name, "cudnn": library.version, "date": str(date.today())},
            "first": answers,
        }
        path = given.out / file_name(name, given.way, given.questions)
        path.write_bytes(
            gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
        )
        print(path, len(answers))


if __name__ == "__main__":
    main()
