"""Record what cuDNN saves for a recurrent layer, and what it works in.

    PYTHONPATH=. python tests/recorded/record_recurrent.py --out FOLDER

Needs a CUDA device whose cuDNN is real. tests/cuda/test_recurrent_sizes.py reads the files;
README.md beside this script tells the format.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator
from datetime import date
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

OUT = Path(__file__).parent / "recurrent"
#: The names of a row's settings.
SETTINGS = (
    "kind",
    "num_layers",
    "bidirectional",
    "dropout",
    "hidden_size",
    "input_size",
    "num_steps",
    "batch_size",
    "proj_size",
    "is_packed",
    "batch_first",
)


def cases() -> Iterator[tuple[Any, ...]]:
    """The settings of each layer."""
    kinds = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    sizes = ((1, 8), (16, 8), (50, 3), (128, 64))
    for kind, layers, both, hidden, size in product(
        kinds, (1, 2, 3), (False, True), (128, 200, 512), sizes
    ):
        for dropout in (0.0, 0.3) if layers > 1 else (0.0,):
            yield kind, layers, both, dropout, hidden, 96, *size, 0, False, False
    for kind in ("lstm", "gru"):
        for hidden, width, size in product(
            (64, 256, 300, 1024), (64, 300, 512), ((32, 16), (200, 32), (7, 1))
        ):
            yield kind, 1, False, 0.0, hidden, width, *size, 0, False, False
        for (packed, first), both in product(
            ((True, False), (True, True), (False, True)), (False, True)
        ):
            yield kind, 2, both, 0.0, 256, 128, 40, 16, 0, packed, first
    for size, both in product(((16, 8), (128, 64)), (False, True)):
        yield "lstm", 2, both, 0.0, 256, 128, *size, 64, False, False


def allocated(call: Callable[[], Any]) -> list[int]:
    """The blocks that a call asks for (positive) and gives back (negative), in bytes."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=100000)
    try:
        call()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]


def sizes(settings: tuple[Any, ...], dtype: torch.dtype) -> list[int]:
    """Workspace and reserve in training mode, and the workspace in evaluation mode.

    cuDNN's forward pass asks for its workspace, then for its reserve, and gives the workspace back.
    Without a reserve it gives the workspace back at once.
    """
    kind, layers, both, dropout, hidden, width, steps, batch, proj, packed, first = settings
    options: dict[str, Any] = {"proj_size": proj} if proj else {}
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    make = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)
    layer = make(
        width, hidden, layers, bidirectional=both, dropout=dropout, batch_first=first, **options
    ).to("cuda", dtype)
    x = torch.randn((batch, steps, width) if first else (steps, batch, width), device="cuda")
    x = x.to(dtype).requires_grad_()
    lengths = torch.linspace(max(steps // 2, 1), steps, batch).long().flip(0)
    given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first) if packed else x
    layer(given)  # the first call makes the state of dropout
    training = allocated(lambda: layer(given))
    layer.eval()
    evaluation = allocated(lambda: layer(given))
    workspace, reserve = next(
        (one, other)
        for one, other, freed in zip(training, training[1:], training[2:], strict=False)
        if one > 0 and freed == -one
    )
    in_evaluation = max(one for one, freed in pairwise(evaluation) if one > 0 and freed == -one)
    return [workspace, reserve, in_evaluation]


def main() -> None:
    """Record this device."""
    parser = argparse.ArgumentParser(description="Record recurrent layers of a device.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    meta = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": str(date.today()),
    }
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = [[list(case), *sizes(case, dtype)] for case in cases()]
        write(out / f"{str(dtype).removeprefix('torch.')}.json.gz", {"meta": meta, "rows": rows})


def write(path: Path, document: Any) -> None:
    """Write one file, the same bytes for the same content."""
    text = json.dumps(document, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
