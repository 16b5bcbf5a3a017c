"""Record what plans that share tiles take for products of many sizes, on a Hopper GPU.

    PYTHONPATH=.:tests python tests/recorded/record_stream_k.py --out FILE

Each product is a convolution of one pixel, in channels last. Each plan that cuDNN listed for the
convolutions of `plans/` is asked by the device's handle, once as it may share tiles and once as it
may not. tests/cuda/test_stream_k.py reads the file; README.md beside this script tells the format.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import torch
from convolution_plans import KNOBS, product, questions
from record_plans import ByHandle, new_handle

from memcallback.cuda.convolution import cudnn, workspace
from memcallback.cuda.convolution.call import Direction
from memcallback.cuda.convolution.cudnn import Attribute, Kind, Type
from memcallback.cuda.convolution.stream_k import Knob
from memcallback.devices.catalogue import find_device

_ENGINE_GRAPH = 1300
_LARGEST_ELEMENTS = 10**9


def plans(library: cudnn.CuDNN) -> list[tuple[Direction, str, int, dict[int, int]]]:
    """Direction, dtype, engine and knobs of all plans that may share tiles, as cuDNN lists them."""
    card, found = find_device("H200"), {}
    for convolution, shape in questions():
        with ExitStack() as stack:
            query = workspace._Query(library, stack, library.device(card))
            for config in query.configs(query.graph(convolution, shape), workspace._MODE_INSTANT):
                knobs = query.knobs(config)
                if knobs.get(Knob.WORKSPACE) == 0 and Knob.CLUSTER_M in knobs:
                    number = query.number(query.engine(config))
                    key = (convolution.direction, convolution.dtype, number, str(knobs))
                    found[key] = (convolution.direction, convolution.dtype, number, knobs)
    return [found[key] for key in sorted(found, key=str)]


def draw(chance: random.Random, dtype: str) -> tuple[int, int, int]:
    """Rows, columns and sums: few tiles or many, short sums or long."""
    rows = 8 * chance.randint(1, int(2 ** chance.uniform(1, 13.5)))
    columns = 8 * chance.randint(1, int(2 ** chance.uniform(0, 7)))
    longer = 6 if dtype == "bfloat16" and chance.random() < 0.6 else 0
    return rows, columns, 8 * int(2 ** chance.uniform(2 + longer, 11.2))


def workspace_bytes(query: ByHandle, graph: int, engine: int, knobs: dict[int, int]) -> int | None:
    """The workspace of an engine with these knobs; None if it does not take them."""
    library = query.library
    made = query._create(Kind.ENGINE)
    library.set(made, _ENGINE_GRAPH, Type.DESCRIPTOR, graph)  # type: ignore[arg-type]
    library.set(made, Attribute.ENGINE_NUMBER, Type.INT64, engine)
    if not library.finalize(made):
        return None
    choices = []
    for kind, value in knobs.items():
        choice = query._create(Kind.KNOB_CHOICE)
        library.set(choice, Attribute.KNOB_TYPE, Type.KNOB, kind)
        library.set(choice, Attribute.KNOB_VALUE, Type.INT64, value)
        choices.append(library.finalized(choice))
    config = query._create(Kind.ENGINE_CONFIG)
    library.set(config, Attribute.CONFIG_ENGINE, Type.DESCRIPTOR, made)
    library.set(config, Attribute.CONFIG_KNOBS, Type.DESCRIPTOR, *choices)
    return query.config_workspace(config) if library.finalize(config) else None


def main() -> None:
    """Draw products, ask, write."""
    parser = argparse.ArgumentParser(description="Record the workspaces of plans that share tiles.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=60, help="products for each plan")
    given = parser.parse_args()
    library = cudnn.load()
    if library is None:
        parser.error("no cuDNN is installed that answers without a device")
    chance, handle, rows = random.Random(5), new_handle(library), []
    for direction, dtype, engine, knobs in plans(library):
        for _ in range(given.each):
            sizes = draw(chance, dtype)
            if sizes[0] * max(sizes[1:]) > _LARGEST_ELEMENTS:
                continue
            convolution, shape = product(direction, dtype, *sizes)
            with ExitStack() as stack:
                query = ByHandle(library, stack, 0, handle)
                graph = query.graph(convolution, shape)
                taken = [
                    workspace_bytes(query, graph, engine, {**knobs, Knob.WORKSPACE: alone})
                    for alone in (0, 1)
                ]
            chosen = [knobs[knob] for knob in KNOBS]
            rows.append([direction.name, dtype, engine, *chosen, *sizes, *taken])
    document = {
        "meta": {
            "device": torch.cuda.get_device_name(),
            "cudnn": library.version,
            "date": str(date.today()),
        },
        "products": rows,
    }
    given.out.write_bytes(
        gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
    )
    print(given.out, len(rows))


if __name__ == "__main__":
    main()
