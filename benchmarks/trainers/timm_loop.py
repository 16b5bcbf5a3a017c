"""Images as timm's training script does it: mixup, autocast, its scaler, an average (timm)."""

from __future__ import annotations

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler

import memcallback as mc
from trainers import NUM_UPDATES, Trained, device

LIBRARIES = ("timm",)


def train() -> Trained:
    """A small vision transformer, 16 images of 160 x 160, clipped gradients, fp16."""
    model = timm.create_model("vit_small_patch16_224", img_size=160, drop_path_rate=0.1)
    model.to(device())
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=NUM_UPDATES)
    average = ModelEmaV3(model, decay=0.999)
    scaler = NativeScaler()
    criterion = SoftTargetCrossEntropy()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)

    def new_batch() -> tuple[torch.Tensor, torch.Tensor]:
        images, classes = torch.randn(16, 3, 160, 160), torch.randint(0, 1000, (16,))
        on_device: tuple[torch.Tensor, torch.Tensor] = mixup(
            images.to(device()), classes.to(device())
        )
        return on_device

    step = mc.TrainingStep(
        model,
        new_batch(),
        loss=lambda model, batch: criterion(model(batch[0]), batch[1]),
        optimizer=optimizer,
        precision="16-mixed",
        clip_grad_norm=1.0,
        also=[average],
    )
    recorder = mc.MemoryRecorder(model, optimizer, sample_every_n_steps=1)
    with (
        mc.MemoryLog(recorder, step, log_dir=None, wait_for_prediction=True, verbose=0) as log,
        recorder.watch(),
    ):
        del step
        model.train()
        for number in range(NUM_UPDATES):
            images, targets = new_batch()
            with torch.autocast(device().type, dtype=torch.float16):
                loss = criterion(model(images), targets)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
            average.update(model, step=number)
            scheduler.step_update(num_updates=number)
            del images, targets, loss
        return Trained(log.prediction, recorder.steps)
