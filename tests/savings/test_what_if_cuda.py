"""On a CUDA device, real or virtual: what a row of a plan says is what training takes once its line
is in the program.
"""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from device_loop import empty_device, record_on_device
from torch import nn

import memcallback as mc
from memcallback.core.units import format_bytes

pytestmark = pytest.mark.cuda

BATCH_SIZE = 64


def network():
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batch():
    return torch.randn(BATCH_SIZE, 3, 64, 64), torch.zeros(BATCH_SIZE, dtype=torch.int64)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def plan():
    return mc.what_if(
        mc.TrainingStep(network(), batch(), loss=loss_of, optimizer=torch.optim.Adam), device="cuda"
    )


def measured(line, dtype):
    """The steady step of a training that begins with a line."""
    empty_device()
    model = network()
    exec(line, {"torch": torch, "model": model})
    images, classes = batch()
    return record_on_device(model, (images.to(dtype), classes), loss_of, torch.optim.Adam, 6)[-1]


@pytest.mark.parametrize(
    ("saving", "dtype"),
    [("freeze all but the last layer", torch.float32), ("bf16-true", torch.bfloat16)],
)
def test_a_row_is_what_training_takes_with_its_line(plan, saving, dtype):
    row = next(row for row in plan.rows if row.saving == saving)
    step = measured(row.line, dtype)
    assert row.peak_allocated_bytes < plan.current.peak_allocated_bytes
    assert step.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.01)
    assert step.peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.01)


@pytest.fixture
def used_by_others():
    """A quarter of the device in use outside PyTorch's allocator."""
    torch.cuda.init()
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    size_bytes = torch.cuda.get_device_properties(0).total_memory // 4
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes)) == 0
    yield size_bytes
    assert driver.cuMemFree_v2(address) == 0


def test_what_others_use_of_the_device_is_left_to_them(used_by_others):
    step = mc.TrainingStep(nn.Linear(64, 64), torch.randn(8, 64), optimizer=torch.optim.SGD)
    plan = mc.what_if(step, device="cuda:0")
    assert (
        plan.current.largest_batch_size
        == mc.suggest_batch_size(step, device="cuda:0", multiple_of=1).batch_size
    )
    assert plan.outside_bytes >= used_by_others
    text = " ".join(plan.to_text().split())
    assert f"{format_bytes(plan.outside_bytes)} in use outside the allocator" in text


def test_in_a_trainer_what_others_use_of_the_device_is_left_to_them(used_by_others, tmp_path):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def planned(**options):
        callback = mc.MemoryCallback(what_if=True, **options)
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            logger=False,
            default_root_dir=tmp_path,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=8))
        return callback.plan

    assert planned().outside_bytes >= used_by_others
    # The memory that somebody else will have for it is all of it for the training.
    assert planned(device="80GiB").outside_bytes is None
