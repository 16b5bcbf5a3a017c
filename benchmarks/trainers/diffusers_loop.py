"""A UNet learns to denoise as diffusers' scripts do it (diffusers, accelerate)."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional as F
from torch.utils.data import DataLoader

import memcallback as mc
from trainers import NUM_UPDATES, Trained

LIBRARIES = ("diffusers", "accelerate")


def train() -> Trained:
    """8 images of 64 x 64, two batches to an update, clipped gradients, an average, bf16."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    unet = UNet2DModel(
        sample_size=64,
        block_out_channels=(64, 128, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, NUM_UPDATES)
    average = EMAModel(unet.parameters())
    images = DataLoader(torch.rand(16 * NUM_UPDATES, 3, 64, 64), batch_size=8)
    unet, optimizer, images, schedule = accelerator.prepare(unet, optimizer, images, schedule)
    average.to(accelerator.device)

    def loss_of(model: torch.nn.Module, clean: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(clean)
        times = torch.randint(0, 1000, (len(clean),), device=clean.device)
        noisy = noise_scheduler.add_noise(clean, noise, times)
        return F.mse_loss(model(noisy, times).sample.float(), noise.float())

    step = mc.TrainingStep(
        unet,
        torch.rand(8, 3, 64, 64),
        loss=loss_of,
        optimizer=optimizer,
        precision="bf16-mixed",
        accumulate=2,
        clip_grad_norm=1.0,
        also=[average],
    )
    recorder = mc.MemoryRecorder(unet, optimizer, sample_every_n_steps=1)
    with (
        mc.MemoryLog(recorder, step, log_dir=None, wait_for_prediction=True, verbose=0) as log,
        recorder.watch(),
    ):
        for clean in images:
            with accelerator.accumulate(unet):
                loss = loss_of(unet, clean)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(unet.parameters())
            del loss
        return Trained(log.prediction, recorder.steps)
