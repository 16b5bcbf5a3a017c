"""How virtual devices differ from real ones, for predictions that are compared with them."""

import os

from memcallback.core.units import MiB, round_up
from memcallback.prediction.allocator import blocks


class AscendingAddresses:
    """A virtual device puts each segment above the one before."""

    def __init__(self):
        self.next_address = 1 << 45

    def new(self, size_bytes):
        address = self.next_address
        self.next_address += round_up(size_bytes, 2 * MiB)
        return address

    known = new


def is_virtual():
    """Whether CUDA devices are virtual: host code is real, kernels do nothing."""
    return os.environ.get("VGPU") == "1"


def predict_as_virtual():
    """Let all predictions of this process be for virtual devices."""
    blocks.Addresses = AscendingAddresses
