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
    assert caveat.startswith("A card of AMD is predicted with the kernels of NVIDIA A100")
    assert caveat.endswith("We have measured nothing on this card.")


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


def step(model=None, dtype=torch.float32):
    model = model or nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return mc.TrainingStep(
        model.to(dtype),
        torch.rand(16, 64, dtype=dtype),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )


def predicted(name, of=None, torch_version=(2, 11)):
    card = replace(find_device(name), torch_version=torch_version)
    return mc.predict(of or step(), device=card)


def sizes(prediction, *, of_workspaces):
    return Counter(
        event.size_bytes
        for event in prediction.trace.at(prediction.batch_size).events
        if isinstance(event, Alloc) and (event.category is Category.WORKSPACE) == of_workspaces
    )


@pytest.mark.parametrize("name", ["MI300X", "MI250", "MI100"])
def test_a_step_differs_from_that_of_an_a100_in_its_workspaces_alone(name):
    amd, nvidia = predicted(name), predicted("A100-80GB")
    assert sizes(amd, of_workspaces=False) == sizes(nvidia, of_workspaces=False)
    assert any(caveat.startswith("A card of AMD") for caveat in amd.caveats)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        # Each of the two threads has handles of its own.
        ("A100-80GB", torch.float32, {8_519_680: 2, 1 * MiB: 1}),
        ("MI300X", torch.float32, {76 * MiB: 2}),
        ("MI300X", torch.bfloat16, {76 * MiB: 2}),
        ("MI250", torch.float32, {76 * MiB: 2}),
        # Here hipBLASLt adds biases alone, and there it has no products in double precision.
        ("MI100", torch.float32, {32 * MiB: 2, 76 * MiB: 1}),
        ("MI300X", torch.float64, {128 * MiB: 2, 76 * MiB: 1}),
    ],
)
def test_each_product_takes_the_workspace_of_its_library(name, dtype, expected):
    assert sizes(predicted(name, step(dtype=dtype)), of_workspaces=True) == expected


def test_an_old_pytorch_takes_a_workspace_for_each_call():
    old = sizes(predicted("MI300X", torch_version=(2, 8)), of_workspaces=True)
    # Three products of an update in the backward pass and two in the forward pass; two updates.
    assert set(old) == {76 * MiB}
    assert old[76 * MiB] == 2 * 5
    assert set(sizes(predicted("MI300X", torch_version=(2, 5)), of_workspaces=True)) <= {0}


def test_a_step_traced_for_nvidia_keeps_its_workspaces_on_amd():
    prediction = predicted("A100-80GB").on("MI300X")
    assert any(
        "was traced for NVIDIA A100-SXM4-80GB (compute capability 8.0)" in caveat
        for caveat in prediction.caveats
    )


def test_another_size_of_an_amd_card_is_still_one():
    prediction = predicted("MI300X").on("24GiB")
    assert prediction.device.amd_architecture == "gfx942"
    assert any("that of AMD Instinct MI300X (gfx942)" in said for said in prediction.caveats)
    assert any(said.startswith("A card of AMD") for said in prediction.caveats)


@pytest.mark.parametrize("layer", [nn.Conv1d(64, 8, 3), nn.LSTM(64, 8)])
def test_nothing_is_said_of_cudnn(layer):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, batch):
            out = self.layer(batch.T if isinstance(self.layer, nn.Conv1d) else batch)
            return out if torch.is_tensor(out) else out[0]

    said = mc.predict(
        mc.TrainingStep(
            Model(),
            torch.rand(16, 64),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=torch.optim.SGD,
        ),
        device="MI300X",
    ).caveats
    assert not any("cuDNN" in caveat for caveat in said)
