"""Record what PyTorch's CUDA build calls and allocates for the cases of `composite_cases`.

    python tests/recorded/record_composites.py NAME    # the device's name there, such as a100

Needs a CUDA device.
Adds to `composites.json` the operators below autograd with the bytes of their outputs, and the
bytes held, without any mode.
"""

import datetime
import gc
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import composite_cases as cases

TARGET = Path(__file__).with_name("composites.json")


def record(group, measure):
    measured = {}
    for name, case in group.items():
        measure(case)
        gc.collect()
        measured[name] = measure(case)
    return measured


def main():
    name = sys.argv[1]
    warnings.simplefilter("ignore")
    recording = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    groups = cases.ATTENTION | (cases.SURVEY if name == "h200" else {})
    held = cases.ATTENTION | cases.RECURRENT | cases.SURVEY if name == "h200" else {}
    recording[name] = {
        "device": torch.cuda.get_device_name(),
        "compute_capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "operators": {
            key: "|".join(lines)
            for key, lines in record(groups, lambda case: cases.logged(case, cases.Maker())).items()
        },
        "held_bytes": record(held, lambda case: cases.held(case, cases.Maker(), None)),
    }
    TARGET.write_text(json.dumps(recording, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
