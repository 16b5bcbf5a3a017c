"""Record the plan that cuDNN puts first for many convolutions, for several cards.

    PYTHONPATH=.:tests python tests/recorded/record_plans.py without
    PYTHONPATH=.:tests python tests/recorded/record_plans.py with       # on a machine with a device
    PYTHONPATH=.:tests python tests/recorded/record_plans.py hidden     # there, made invisible
    PYTHONPATH=.:tests python tests/recorded/record_plans.py handle --cards H200    # its own card

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
from convolution_plans import CARDS, RECORDED, questions

from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.cudnn import Attribute, Kind, Type
from memcallback.devices.catalogue import find_device

_HANDLE, _GRAPH_HANDLE, _ENGINE_NUMBER = 0, 800, 1301


@dataclass(frozen=True)
class ByHandle(workspace._Query):
    """Asks with cuDNN's handle of this machine's device, as PyTorch does."""

    handle: int = 0

    def _create(self, kind: int) -> int:
        made = super()._create(kind)
        if kind == Kind.GRAPH:
            self.library.set(made, _GRAPH_HANDLE, _HANDLE, self.handle)  # type: ignore[arg-type]
        return made

    def configs(self, graph: int, mode: int) -> list[int]:
        """The heuristics' engine configurations for the device of the handle."""
        heuristics = self._create(Kind.HEURISTICS)
        self.library.set(heuristics, Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, graph)
        self.library.set(heuristics, Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, mode)
        if not self.library.finalize(heuristics):
            return []
        room = self.library.count(heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
        made = [self._create(Kind.ENGINE_CONFIG) for _ in range(room)]
        return self.library.get(
            heuristics, Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR, room, made
        )


def new_handle(library: cudnn.CuDNN) -> int:
    """cuDNN's handle of this machine's device."""
    handle = ctypes.c_void_p()
    status = library._library.cudnnCreate(ctypes.byref(handle))
    if status:
        raise cudnn.CuDNNError(f"cuDNN made no handle (status {status})")
    return int(handle.value or 0)


def first_plan(query: workspace._Query, convolution: Any, shape: Any) -> list[int] | None:
    """The engine's number and the workspace in bytes of the plan that PyTorch tries first."""
    graph = query.graph(convolution, shape)
    for mode in (workspace._MODE_INSTANT, workspace._MODE_FALLBACK):
        for config in query.configs(graph, mode):
            engine = query.engine(config)
            if workspace._is_filtered(convolution, query.notes(engine)):
                continue
            number = query.library.get(engine, _ENGINE_NUMBER, Type.INT64, 1)[0]  # type: ignore[arg-type]
            size_bytes = query.library.get(config, Attribute.CONFIG_WORKSPACE, Type.INT64, 1)[0]
            return [number, size_bytes]
    return None


def main() -> None:
    """Record what cuDNN answers here."""
    parser = argparse.ArgumentParser(description="Record cuDNN's first plans.")
    parser.add_argument("way", choices=("with", "without", "hidden", "handle"))
    parser.add_argument("--out", type=Path, default=RECORDED)
    parser.add_argument("--cards", nargs="*", default=CARDS)
    given = parser.parse_args()
    if given.way == "handle" and len(given.cards) != 1:
        parser.error("handle: name this machine's card with --cards")
    if (given.way in ("without", "hidden")) is torch.cuda.is_available():
        parser.error(
            f"{given.way}: PyTorch finds {'a' if torch.cuda.is_available() else 'no'} device"
        )
    library = cudnn.load()
    if library is None:
        parser.error("no cuDNN is installed that answers without a device")
    cudnn._C_TYPES[_HANDLE] = ctypes.c_void_p  # type: ignore[index]
    handle = new_handle(library) if given.way == "handle" else 0
    for name in given.cards:
        card = find_device(name)
        answers = []
        for convolution, shape in questions():
            with ExitStack() as stack:
                query = (
                    ByHandle(library, stack, 0, handle)
                    if handle
                    else workspace._Query(library, stack, library.device(card))
                )
                answers.append(first_plan(query, convolution, shape))
        document = {
            "meta": {"card": name, "cudnn": library.version, "date": str(date.today())},
            "first": answers,
        }
        path = given.out / f"{name.replace(' ', '-')}.{given.way}.json.gz"
        path.write_bytes(
            gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
        )
        print(path, len(answers))


if __name__ == "__main__":
    main()
