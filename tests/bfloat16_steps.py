"""Training steps in bfloat16 for a card without it.

PyTorch takes other kernels there: convolutions without cuDNN, attention written out.

    python tests/bfloat16_steps.py

On a machine with such a CUDA device it records what each phase of their third update takes.
"""

import datetime
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from memcallback import MemoryRecorder, Phase, TrainingStep

RECORDED = Path(__file__).parent / "recorded" / "bfloat16.json"


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner, self.outer, self.options = nn.Linear(64, 192), nn.Linear(64, 64), options

    def forward(self, x):
        query, key, value = self.inner(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return self.outer(
            F.scaled_dot_product_attention(query, key, value, **self.options)
            .transpose(1, 2)
            .flatten(2)
        )


def network():
    """Plain, strided, grouped, dilated and transposed convolutions, with and without bias."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(32, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 8, 2, stride=2),
    )


IMAGES, TEXTS = (8, 3, 64, 64), (8, 96, 64)
#: Name -> model, shape of the batch, precision.
STEPS = {
    "convolutions": (network, IMAGES, "bf16-mixed"),
    "convolutions, channels last": (
        lambda: network().to(memory_format=torch.channels_last),
        IMAGES,
        "bf16-mixed",
    ),
    "convolutions, bf16-true": (network, IMAGES, "bf16-true"),
    "attention": (Attention, TEXTS, "bf16-mixed"),
    "causal attention": (lambda: Attention(is_causal=True), TEXTS, "bf16-mixed"),
    "attention with dropout, bf16-true": (lambda: Attention(dropout_p=0.1), TEXTS, "bf16-true"),
}


def model_and_batch(name):
    """Both on the host, in the precision in which they train."""
    make, shape, precision = STEPS[name]
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    batch = torch.zeros(shape, dtype=dtype)
    return make().to(dtype), batch.to(
        memory_format=torch.channels_last
    ) if "channels last" in name else batch


def loss_of(model, batch):
    return model(batch).float().square().mean()


def step(name):
    """The step as a user describes it."""
    return TrainingStep(
        *model_and_batch(name), loss=loss_of, optimizer=torch.optim.Adam, precision=STEPS[name][2]
    )


def measured(name):
    """The bytes of each phase of the third update: allocated at its start, at its end and at most,
    reserved at most.
    """
    model, on_host = model_and_batch(name)
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    recorder = MemoryRecorder(model, optimizer)
    gc.disable()
    for _ in range(3):
        batch = on_host.cuda()
        optimizer.zero_grad()
        with recorder.step(batch):
            with (
                recorder.phase(Phase.FORWARD),
                torch.autocast("cuda", torch.bfloat16, enabled=STEPS[name][2] == "bf16-mixed"),
            ):
                loss = loss_of(model, batch)
            with recorder.phase(Phase.BACKWARD):
                loss.backward()
            with recorder.phase(Phase.OPTIMIZER_STEP):
                optimizer.step()
        del batch, loss
    recorder.close()
    return figures(recorder.steps[-1])


def figures(step):
    """Those of each phase of a step."""
    return [
        [
            window.start.allocated_bytes,
            window.end.allocated_bytes,
            window.peak_allocated_bytes,
            window.peak_reserved_bytes,
        ]
        for window in step.windows
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
    else:
        outputs = {
            name: subprocess.run(
                [sys.executable, __file__, name], check=True, capture_output=True
            ).stdout
            for name in STEPS
        }
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        RECORDED.write_text(
            json.dumps(
                {**about, "steps": {name: json.loads(text) for name, text in outputs.items()}},
                indent=1,
            )
            + "\n"
        )
