"""Cards of AMD: PyTorch's allocator is the same there, the workspaces of libraries are not."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import memcallback as mc
from memcallback.core.allocation_trace import Alloc
from memcallback.core.types import Category
from memcallback.core.units import GiB, MiB
from memcallback.devices.catalogue import ALL_CARDS, CATALOGUE, find_device

AMD_CARDS = [card for card in ALL_CARDS if card not in CATALOGUE]


@pytest.mark.parametrize(
    ("text", "name", "memory_gib"),
    [
        ("MI300X", "AMD Instinct MI300X", 192),
        ("amd mi300x", "AMD Instinct MI300X", 192),
        ("AMD Instinct MI250X", "AMD Instinct MI250X", 64),
        ("RX 7900 XTX", "AMD Radeon RX 7900 XTX", 24),
        ("7900 xt", "AMD Radeon RX 7900 XT", 20),
        ("w7900", "AMD Radeon PRO W7900", 48),
    ],
)
def test_a_card_is_found_by_name(text, name, memory_gib):
    card = find_device(text)
    assert (card.name, card.capacity_bytes) == (name, memory_gib * GiB)


@pytest.mark.parametrize("card", AMD_CARDS, ids=lambda card: card.name)
def test_every_card_says_what_is_assumed(card):
    assert find_device(card.name) == card
    (caveat,) = card.caveats
    assert caveat.startswith(f"{card.name} is predicted with the kernels of NVIDIA A100")


def test_a_name_without_its_last_letter_is_no_card():
    with pytest.raises(ValueError, match=r"'MI300' is not a known card. Similar names: .*MI300X"):
        find_device("MI300")


@pytest.mark.parametrize(
    ("name", "torch_version", "hipblas_mib", "hipblaslt_mib", "owner"),
    [
        ("MI300X", (2, 5), 0, 0, "each call"),
        ("MI300X", (2, 6), 128, 76, "each call"),
        ("MI300X", (2, 9), 128, 76, "each handle"),
        ("MI355X", (2, 14), 128, 76, "each handle"),
        ("MI250X", (2, 14), 32, 76, "each handle"),
        ("RX 7900 XTX", (2, 14), 32, 76, "each handle"),
    ],
)
def test_workspaces_follow_pytorch_s_source(name, torch_version, hipblas_mib, hipblaslt_mib, owner):
    card = replace(find_device(name), torch_version=torch_version)
    assert card.cublas_workspace_bytes == hipblas_mib * MiB
    assert card.cublaslt_workspace_bytes == hipblaslt_mib * MiB
    assert card.cublaslt_workspace == owner


def predicted(name):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    step = mc.TrainingStep(
        model,
        torch.rand(16, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )
    return mc.predict(step, device=replace(find_device(name), torch_version=(2, 11)))


def sizes(prediction, *, of_workspaces):
    return Counter(
        event.size_bytes
        for event in prediction.trace.at(prediction.batch_size).events
        if isinstance(event, Alloc) and (event.category is Category.WORKSPACE) == of_workspaces
    )


def test_a_step_differs_from_that_of_an_a100_in_its_workspaces_alone():
    amd, nvidia = predicted("MI300X"), predicted("A100-80GB")
    assert sizes(amd, of_workspaces=False) == sizes(nvidia, of_workspaces=False)
    # Each of the two threads has handles of its own; without gradients of biases no cuBLASLt.
    assert sizes(nvidia, of_workspaces=True) == {8_519_680: 2, 1 * MiB: 1}
    assert sizes(amd, of_workspaces=True) == {128 * MiB: 2, 76 * MiB: 1}
    assert any("workspaces of hipBLAS" in caveat for caveat in amd.caveats)


def test_a_step_traced_for_nvidia_keeps_its_workspaces_on_amd():
    prediction = predicted("A100-80GB").on("MI300X")
    assert any("The step was traced for NVIDIA A100" in caveat for caveat in prediction.caveats)
