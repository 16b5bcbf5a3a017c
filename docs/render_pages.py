"""Make the pictures of the docs' page "The memory page": predicted and measured steps as pages.

    python docs/render_pages.py

Predicts GPT-2 small and Llama 3.2 1B on meta tensors, trains with a leak, and, on a CUDA device,
runs out of memory; renders each page with headless Chromium into `docs/images/`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from render_dashboard import IMAGES, ROOT, find_browser, render
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memcallback as mc
from memcallback.cli import main as main_of_command
from memcallback.savings.plan_page import plan_sections


def loss_of(model: nn.Module, tokens: torch.Tensor) -> Any:
    """The loss of a language model."""
    return model(input_ids=tokens, labels=tokens).loss


def gpt2() -> mc.TrainingStep:
    """GPT-2 small, 8 sequences of 512 tokens."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
        tokens = torch.zeros(8, 512, dtype=torch.long)
    return mc.TrainingStep(
        model, tokens, loss=loss_of, optimizer=torch.optim.AdamW, precision="bf16-mixed"
    )


def llama() -> mc.TrainingStep:
    """Llama 3.2 1B in bfloat16, two sequences of 4,096 tokens; figures of its model card."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(2, 4096, dtype=torch.long)
    return mc.TrainingStep(model, tokens, loss=loss_of, optimizer=torch.optim.AdamW)


def write_reports(folder: Path) -> None:
    """The pages that `memcallback report` writes; GPT-2's has `--what-if`."""
    device = "NVIDIA GeForce RTX 4090"
    plan = mc.what_if(gpt2(), device=device, timeout_s=3600)
    page = mc.predict(gpt2(), device=device).page("models:gpt2", more=list(plan_sections(plan)))
    (folder / "gpt2.html").write_text(page.html(), encoding="utf-8")
    main_of_command(
        ["report", "render_pages:llama", "--device", device, "-o", str(folder / "llama.html")]
    )


class Language(lightning.LightningModule):
    """GPT-2 small on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def run_out_of_memory(folder: Path) -> Path:
    """Train GPT-2 with four small batches and one that is too large for the card; the report."""
    batches = [list(range(4))] * 4 + [list(range(48))]
    trainer = lightning.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[mc.MemoryCallback()],
    )
    tokens = torch.zeros(48, 512, dtype=torch.long)
    with contextlib.suppress(torch.OutOfMemoryError):
        trainer.fit(Language(), DataLoader(tokens, batch_sampler=batches))
    (page,) = folder.rglob("out_of_memory*.html")
    return page


def leak(folder: Path, device: str) -> Path:
    """Train a small network in a loop that keeps each step's outputs, a common mistake."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = mc.MemoryRecorder(model, optimizer)
    kept = []
    batch = torch.randn(256, 512, device=device)
    step = mc.TrainingStep(
        model,
        batch,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )
    with recorder.watch(), mc.MemoryLog(recorder, step, log_dir=folder, warnings=True):
        for _ in range(400):
            output = model(batch)
            kept.append(output)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (page,) = folder.rglob("memory.html")
    return page


def main() -> None:
    """Write the pages and render them."""
    parser = argparse.ArgumentParser(description="Render the pictures of the memory page.")
    parser.add_argument("--browser", help="a Chromium or Chrome; by default the first on the path")
    device_here = "cuda" if torch.cuda.is_available() else "cpu"
    browser = parser.parse_args().browser or find_browser()
    # The first step waits for its prediction, however busy the machine is.
    os.environ["MEMCALLBACK_ISOLATE"] = "0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_reports(folder)
        # Before the other training, whose reserved memory would hide what it adds.
        leaking = leak(folder / "leak", device_here)
        out_of_memory = {}
        if device_here == "cuda":
            torch.cuda.empty_cache()
            page = run_out_of_memory(folder / "oom")
            out_of_memory["page-out-of-memory"] = (page, 1160, 2300, ())
        else:
            print("page-out-of-memory.png is left as it is: it takes a CUDA device.")
        pages = {
            "page-gpt2": (folder / "gpt2.html", 1160, 1240, ()),
            "page-gpt2-dark": (folder / "gpt2.html", 1160, 2350, (DARK,)),
            "page-gpt2-narrow": (folder / "gpt2.html", 500, 2600, ()),
            "page-does-not-fit": (folder / "llama.html", 1160, 1740, ()),
            **out_of_memory,
            "page-leak": (leaking, 1160, 1700, ()),
        }
        for image, (page, width, height, options) in pages.items():
            to = IMAGES / f"{image}.png"
            render(browser, page.as_uri(), width, height, to, options)
    print(f"Pictures: {', '.join(sorted(pages))} in {IMAGES.relative_to(ROOT)}")


#: The browser as on a dark desktop.
DARK = "--blink-settings=preferredColorScheme=0"

if __name__ == "__main__":
    main()
