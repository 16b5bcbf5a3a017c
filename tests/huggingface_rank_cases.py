"""One rank of a Hugging Face Trainer on CUDA devices: what its callback predicts and measures; run
by test_huggingface_ranks_cuda.py.
"""

from __future__ import annotations

import json
import os
import warnings

import torch
from rank_cases import figures, wait_until_seen

NUM_STEPS, BATCH_SIZE, LENGTH, VOCABULARY = 6, 4, 128, 5000


class Stream(torch.utils.data.IterableDataset):
    """Rows of which nobody knows how many there are; each batch has more memory than a loss."""

    def __init__(self, rows):
        self._rows = list(rows)

    def __iter__(self):
        return iter(self._rows)


def run(rank, world_size, folder, options, port, predicts=True):
    warnings.simplefilter("ignore")  # of the Trainer and of PyTorch's compiler
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import memcallback as mc

    class Waits(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            torch.cuda.synchronize()
            wait_until_seen()

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_head=4,
        n_embd=512,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    num_samples = NUM_STEPS * BATCH_SIZE * world_size
    labels = torch.randint(0, VOCABULARY, (num_samples, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in labels]
    if options.pop("is_stream", False):
        embedded = torch.randn(num_samples, LENGTH, config.n_embd)
        rows = Stream(
            {"inputs_embeds": one, "labels": row} for one, row in zip(embedded, labels, strict=True)
        )
    callback = mc.MemoryTrainerCallback(predict=predicts, wait_for_prediction=True)
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=rows,
        callbacks=[callback, Waits()],
    ).train()
    if not predicts:
        return
    found = {
        "predicted": figures(callback.prediction.step),
        "measured": figures(callback.recorder.steps[-1]),
        "caveats": callback.prediction.caveats,
        "notes": callback.report.notes,
    }
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
