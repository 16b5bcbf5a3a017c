"""Training steps whose matrix products take workspaces of cuBLAS and cuBLASLt.

    python tests/workspace_steps.py

On a machine with a CUDA device it adds what each phase of their updates takes with the installed
PyTorch.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import torch
from device_loop import figures, record_on_device
from torch import nn
from torch.utils.checkpoint import checkpoint

from memcallback import TrainingStep

RECORDED = Path(__file__).parent / "recorded" / "workspaces.json"


def perceptron(bias=True):
    return nn.Sequential(nn.Linear(256, 512, bias=bias), nn.ReLU(), nn.Linear(512, 64, bias=bias))


class RunsAgain(nn.Module):
    """The backward pass runs its layers with their biases once more, in a thread of its own."""

    def __init__(self):
        super().__init__()
        self.layers = perceptron()

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class TwoStreams(nn.Module):
    """The second layer runs in a stream of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.stream = nn.Linear(256, 512), nn.Linear(512, 64), None

    def forward(self, x):
        self.stream = self.stream or torch.cuda.Stream()
        hidden = self.first(x)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            out = self.second(hidden)
        torch.cuda.current_stream().wait_stream(self.stream)
        return out


#: Name -> model.
STEPS = {
    "linear layers": perceptron,
    "linear layers without bias": lambda: perceptron(bias=False),
    "linear layers that run again": RunsAgain,
    "linear layers in two streams": TwoStreams,
}


def batch():
    return torch.zeros(128, 256)


def loss_of(model, batch):
    return model(batch).square().mean()


def step(name):
    """The step as a user describes it."""
    return TrainingStep(STEPS[name](), batch(), loss=loss_of, optimizer=torch.optim.AdamW)


def measured(name):
    """The figures of each phase of the first update and of a later one."""
    first, *_, later = record_on_device(STEPS[name](), batch(), loss_of, torch.optim.AdamW)
    return [figures(first), figures(later)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
    else:
        recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        version, device = torch.__version__.partition("+")[0], torch.cuda.get_device_name()
        recorded[f"{version}, {device}"] = {
            "torch": torch.__version__,
            "device": device,
            "date": datetime.date.today().isoformat(),
            "steps": {
                name: json.loads(
                    subprocess.run(
                        [sys.executable, __file__, name], check=True, capture_output=True
                    ).stdout
                )
                for name in STEPS
            },
        }
        lines = [f"{json.dumps(run)}: {json.dumps(recorded[run])}" for run in sorted(recorded)]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
