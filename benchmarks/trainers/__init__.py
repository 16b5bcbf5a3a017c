"""Trainings by the libraries' own trainers and loops; `train()` of a file runs one with us."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import memcallback as mc

NUM_UPDATES = 6
NUM_WORDS = 2000


@dataclass
class Trained:
    """What a training gave.

    Attributes:
        prediction: The prediction of its step; None if there was none.
        steps: The recorded steps.
    """

    prediction: Any
    steps: Any


def names() -> list[str]:
    """The trainings' names."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))


def new_folder() -> str:
    """A folder for what a trainer writes."""
    return tempfile.mkdtemp()


def arguments(**others: Any) -> dict[str, Any]:
    """What the arguments of all Trainers of transformers are here."""
    return {
        "output_dir": new_folder(),
        "max_steps": NUM_UPDATES,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": True,
        "disable_tqdm": True,
        **others,
    }


def by_callback(make_trainer: Any) -> Trained:
    """Train with the Trainer that `make_trainer(callbacks=[...])` gives."""
    callback = mc.MemoryTrainerCallback(wait_for_prediction=True, verbose=0)
    make_trainer(callbacks=[callback]).train()
    assert callback.recorder is not None
    return Trained(callback.prediction, callback.recorder.steps)


def by_lightning(
    module: Any, rows: torch.Tensor, batch_size: int, callbacks: Any = (), **options: Any
) -> Trained:
    """Train a LightningModule on rows, and validate it where it does that."""
    from lightning.pytorch import Trainer

    callback = mc.MemoryCallback(wait_for_prediction=True, verbose=0)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=None,
        max_steps=NUM_UPDATES,
        logger=False,
        log_every_n_steps=1,
        default_root_dir=new_folder(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, callback],
        **options,
    )
    loader = DataLoader(TensorDataset(rows), batch_size=batch_size)
    has_validation = "validation_step" in vars(type(module))
    trainer.fit(module, loader, loader if has_validation else None)
    assert callback.recorder is not None
    return Trained(callback.prediction, callback.recorder.steps)


def llama() -> LlamaForCausalLM:
    """Llama of 3 layers of width 256."""
    return LlamaForCausalLM(llama_config())


def llama_config(**others: Any) -> LlamaConfig:
    """Its configuration."""
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=NUM_WORDS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **others,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word `w0`, `w1`, ..."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words = {f"w{i}": i + len(special) for i in range(NUM_WORDS - len(special))}
    own = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast  # which is not typed
    made: PreTrainedTokenizerFast = make(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return made


def text(first: int, length: int) -> str:
    """Some words."""
    return " ".join(f"w{(7 * first + i) % 1900}" for i in range(length))


def device() -> torch.device:
    """Where it trains."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
