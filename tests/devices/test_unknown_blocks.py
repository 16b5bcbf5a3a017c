"""PyTorch's line about blocks of unknown size: ours writes none, others what they would."""

import subprocess
import sys
import textwrap

import pytest

from memcallback.core.tensors import torch_version

LINE = "Memory block of unknown size was allocated before the profiling started"
TRAINING = """
import torch
from torch import nn
from memcallback import MemoryRecorder

model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(150)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = MemoryRecorder(model, optimizer)
kept = [torch.ones(64) for _ in range(1500)]
with recorder.watch():
    for _ in range(8):
        optimizer.zero_grad()
        output = model(torch.ones(4, 8))
        del kept[-90:]
        output.sum().backward()
        del kept[-90:]
        optimizer.step()
assert recorder.steady.peak_allocated_bytes > 0
"""
OTHER_PROFILE = """
with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True):
    del kept[-1:]
"""


def stderr_of(program):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the count is found on Linux alone")
@pytest.mark.skipif(
    torch_version() > (2, 13), reason="where the count lies was read up to PyTorch 2.13"
)
def test_recording_on_a_cpu_writes_no_line_about_blocks_of_unknown_size():
    assert LINE not in stderr_of(TRAINING)


def test_a_profile_of_the_users_writes_the_line_as_it_would_without_us():
    assert stderr_of(TRAINING + OTHER_PROFILE).count(LINE) == 1
    alone = "import torch\nkept = [torch.ones(64)]\n" + OTHER_PROFILE
    assert stderr_of(alone).count(LINE) == 1
