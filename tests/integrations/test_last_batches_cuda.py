"""The callbacks find the smaller last batch of an epoch, for which a compiled step changes."""

import os

import pytest
import test_huggingface
import torch
import training

import memcallback as mc

pytestmark = [
    pytest.mark.cuda,
    # All are PyTorch's or Lightning's, without us too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="compiles in a child alone"),
]


@pytest.fixture(autouse=True)
def in_a_child(monkeypatch):
    monkeypatch.delenv("MEMCALLBACK_ISOLATE", raising=False)
    yield
    torch._dynamo.reset()


def followed(callback):
    return [said for said in callback.prediction.caveats if "for the updates after one" in said]


@pytest.mark.parametrize(
    ("options", "is_followed"),
    [
        ({"max_epochs": 2}, True),
        ({"max_epochs": 1}, False),
        ({"max_epochs": 2, "max_steps": 4}, False),
        ({"max_epochs": 2, "limit_train_batches": 3}, False),
    ],
)
def test_in_lightning(tmp_path, options, is_followed):
    module = training.Automatic()
    # In place, PyTorch would compile nothing of its own nn.Sequential.
    module.network = torch.compile(module.network)
    callback = mc.MemoryCallback(wait_for_prediction=True)
    data = training.loader(num_batches=5, batch_size=5).dataset
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    training.trainer(tmp_path, [callback], accelerator="gpu", **options).fit(module, loader)
    said = followed(callback)
    assert len(said) == is_followed
    assert all("a batch of 1 sample, " in sentence for sentence in said)


def test_in_a_trainer_of_transformers(tmp_path):
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True)
    test_huggingface.train(
        tmp_path,
        callback,
        use_cpu=False,
        torch_compile=True,
        num_train_epochs=2,
        samples=test_huggingface.data(11),
    )
    (said,) = followed(callback)
    assert "a batch of 3 samples, " in said
    assert callback.report.measured.batch_size in (3, 4)
