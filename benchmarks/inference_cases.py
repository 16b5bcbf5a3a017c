"""Models that run without a backward pass: inference, validation after training, generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models.workloads import WORKLOADS
from torch import nn

Batch = Any
#: Tokens that are generated.
NUM_TOKENS = 60


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch for it, on the host.

    Attributes:
        model: Makes the model.
        batch: Makes a batch.
        forward: The forward pass; None for `model(batch)` or `model(**batch)`.
        loss: The loss of the training that a validation comes after; None to leave it out.
        generate: Arguments of `generate`; None for a forward pass.
        precision: As for `memcallback.InferenceStep`.
        held_out: Whether it was added when the prediction was done.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    forward: Callable[[Any, Batch], Any] | None = None
    loss: Callable[[Any, Batch], torch.Tensor] | None = None
    generate: Mapping[str, Any] | None = None
    precision: str = "32-true"
    held_out: bool = False


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    """The loss that a model of transformers returns."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _workload(name: str, precision: str = "32-true") -> Case:
    workload = WORKLOADS[name]
    return Case(
        model=workload.model,
        batch=workload.batch,
        forward=workload.losses[0],
        loss=workload.losses[0],
        precision=precision,
    )


def _tokens(*shape: int, vocabulary: int) -> Callable[[], Batch]:
    return lambda: {"input_ids": torch.randint(3, vocabulary, shape)}


def _labelled(*shape: int, vocabulary: int) -> Callable[[], Batch]:
    def make() -> Batch:
        tokens = torch.randint(3, vocabulary, shape)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return make


def _transformers(class_name: str, config_name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, config_name)(**options)
        model: nn.Module = getattr(transformers, class_name)(config)
        return model

    return make


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        area = "detection" if "rcnn" in name or "retina" in name or "ssd" in name else None
        area = "segmentation" if "deeplab" in name or "fcn_" in name else area
        models = torchvision.models if area is None else getattr(torchvision.models, area)
        model: nn.Module = getattr(models, name)(weights=None, **options)
        return model

    return make


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model

    return make


def _images(*shape: int) -> Callable[[], Batch]:
    return lambda: torch.randn(shape)


def _classify(model: Any, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(
        model(batch), torch.zeros(len(batch), dtype=torch.long, device=batch.device)
    )


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).logits.square().mean()
    return loss


def _segment(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch)["out"].square().mean()
    return loss


_GPT2 = {"n_layer": 4, "n_head": 8, "n_embd": 512, "vocab_size": 5000, "n_positions": 1024}
_LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": 4096,
}
_T5 = {
    "d_model": 256,
    "d_ff": 1024,
    "num_layers": 3,
    "num_heads": 4,
    "vocab_size": 4000,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "vocab_size": 2000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}


def _whisper_batch() -> Batch:
    return {
        "input_features": torch.randn(4, 80, 3000),
        "labels": torch.randint(3, 2000, (4, 32)),
    }


def _wav2vec2_batch() -> Batch:
    return {"input_values": torch.randn(4, 32000), "labels": torch.randint(1, 30, (4, 20))}


def _clip_batch() -> Batch:
    return {
        "input_ids": torch.randint(3, 1000, (16, 32)),
        "attention_mask": torch.ones(16, 32, dtype=torch.long),
        "pixel_values": torch.randn(16, 3, 224, 224),
        "return_loss": True,
    }


def _detr_batch() -> Batch:
    return {"pixel_values": torch.randn(2, 3, 320, 320)}


def _detection_batch() -> Batch:
    return [torch.rand(3, 320, 320) for _ in range(2)]


FORWARD: dict[str, Case] = {
    "vgg16": _workload("vgg16"),
    "resnet50": _workload("resnet50", "bf16-mixed"),
    "efficientnet": _workload("efficientnet"),
    "unet": _workload("unet", "16-mixed"),
    "vit-s16": _workload("vit-s16", "bf16-mixed"),
    "swin": _workload("swin"),
    "gpt2": _workload("gpt2", "bf16-mixed"),
    "llama": _workload("llama", "bf16-mixed"),
    "bert": _workload("bert"),
    "torch-encoder": _workload("torch-encoder"),
    "t5": _workload("t5"),
    "speech-ctc": _workload("speech-ctc"),
    "wavenet": _workload("wavenet"),
    "dlrm": _workload("dlrm"),
    "clip": _workload("clip", "bf16-mixed"),
    "torchvision-resnet18": Case(
        model=_torchvision("resnet18"), batch=_images(16, 3, 224, 224), loss=_classify
    ),
    "torchvision-deeplabv3": Case(
        model=_torchvision("deeplabv3_resnet50", weights_backbone=None),
        batch=_images(2, 3, 256, 256),
        loss=_segment,
    ),
    "timm-convnext": Case(
        model=_timm("convnext_tiny"),
        batch=_images(8, 3, 224, 224),
        loss=_classify,
        precision="bf16-mixed",
    ),
    "transformers-gpt2": Case(
        model=_transformers("GPT2LMHeadModel", "GPT2Config", **_GPT2),
        batch=_labelled(4, 256, vocabulary=5000),
        loss=own_loss,
    ),
    "transformers-whisper": Case(
        model=_transformers("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        batch=_whisper_batch,
        loss=own_loss,
    ),
    "transformers-wav2vec2": Case(
        model=_transformers(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            hidden_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            mask_time_prob=0.0,
            layerdrop=0.0,  # drawn at random, it would leave layers without gradients
        ),
        batch=_wav2vec2_batch,
        loss=own_loss,
        precision="bf16-mixed",
    ),
    "transformers-clip": Case(
        model=_transformers("CLIPModel", "CLIPConfig"), batch=_clip_batch, loss=own_loss
    ),
    "transformers-detr": Case(
        model=_transformers(
            "DetrForObjectDetection",
            "DetrConfig",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            encoder_layers=2,
            decoder_layers=2,
        ),
        batch=_detr_batch,
        loss=_logits,
    ),
    "transformers-yolos": Case(
        model=_transformers(
            "YolosForObjectDetection",
            "YolosConfig",
            hidden_size=192,
            num_hidden_layers=4,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=[256, 256],
        ),
        batch=lambda: {"pixel_values": torch.randn(2, 3, 256, 256)},
        loss=_logits,
        precision="bf16-mixed",
    ),
    "transformers-segformer": Case(
        model=_transformers("SegformerForSemanticSegmentation", "SegformerConfig"),
        batch=lambda: {"pixel_values": torch.randn(2, 3, 256, 256)},
        loss=_logits,
    ),
    "transformers-roberta": Case(
        model=_transformers(
            "RobertaForSequenceClassification",
            "RobertaConfig",
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=4,
        ),
        batch=_tokens(16, 128, vocabulary=5000),
        loss=_logits,
        precision="bf16-mixed",
        held_out=True,
    ),
    "transformers-hubert": Case(
        model=_transformers(
            "HubertForCTC",
            "HubertConfig",
            hidden_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            mask_time_prob=0.0,
            layerdrop=0.0,  # drawn at random, it would leave layers without gradients
        ),
        batch=lambda: {"input_values": torch.randn(4, 32000)},
        loss=_logits,
        held_out=True,
    ),
    "transformers-vit": Case(
        model=_transformers("ViTForImageClassification", "ViTConfig", num_hidden_layers=4),
        batch=lambda: {"pixel_values": torch.randn(8, 3, 224, 224)},
        loss=_logits,
        precision="16-mixed",
        held_out=True,
    ),
    "torchvision-mobilenet": Case(
        model=_torchvision("mobilenet_v3_large"),
        batch=_images(16, 3, 224, 224),
        loss=_classify,
        precision="bf16-mixed",
        held_out=True,
    ),
    "torchvision-fcn": Case(
        model=_torchvision("fcn_resnet50", weights_backbone=None),
        batch=_images(2, 3, 224, 224),
        loss=_segment,
        held_out=True,
    ),
    "timm-mixer": Case(
        model=_timm("mixer_s16_224"),
        batch=_images(8, 3, 224, 224),
        loss=_classify,
        held_out=True,
    ),
    "transformers-qwen3": Case(
        model=_transformers("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA),
        batch=_tokens(2, 256, vocabulary=8000),
        loss=_logits,
        precision="bf16-mixed",
        held_out=True,
    ),
    "transformers-conditional-detr": Case(
        model=_transformers(
            "ConditionalDetrForObjectDetection",
            "ConditionalDetrConfig",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            encoder_layers=2,
            decoder_layers=2,
        ),
        batch=_detr_batch,
        loss=_logits,
        held_out=True,
    ),
}

GENERATION: dict[str, Case] = {
    "gpt2-greedy": Case(
        model=_transformers("GPT2LMHeadModel", "GPT2Config", **_GPT2),
        batch=_tokens(4, 64, vocabulary=5000),
        generate=_GREEDY,
    ),
    "llama-sampling": Case(
        model=_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        batch=_tokens(4, 128, vocabulary=8000),
        generate={**_GREEDY, "do_sample": True, "top_k": 50, "top_p": 0.9},
        precision="bf16-mixed",
    ),
    "llama-static": Case(
        model=_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        batch=_tokens(2, 100, vocabulary=8000),
        generate={**_GREEDY, "cache_implementation": "static", "disable_compile": True},
    ),
    "mistral-window": Case(
        model=_transformers("MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=32),
        batch=_tokens(2, 100, vocabulary=8000),
        generate=_GREEDY,
    ),
    "gpt2-beams": Case(
        model=_transformers("GPT2LMHeadModel", "GPT2Config", **_GPT2),
        batch=_tokens(2, 64, vocabulary=5000),
        generate={**_GREEDY, "num_beams": 4},
    ),
    "t5-greedy": Case(
        model=_transformers("T5ForConditionalGeneration", "T5Config", **_T5),
        batch=_tokens(4, 80, vocabulary=4000),
        generate=_GREEDY,
    ),
    "whisper-greedy": Case(
        model=_transformers("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
        batch=lambda: {"input_features": torch.randn(2, 80, 3000)},
        generate=_GREEDY,
    ),
    "qwen3-greedy": Case(
        model=_transformers("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA),
        batch=_tokens(3, 90, vocabulary=8000),
        generate=_GREEDY,
        precision="bf16-mixed",
        held_out=True,
    ),
    "opt-sampling": Case(
        model=_transformers(
            "OPTForCausalLM",
            "OPTConfig",
            hidden_size=512,
            ffn_dim=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            vocab_size=5000,
            word_embed_proj_dim=512,
        ),
        batch=_tokens(4, 70, vocabulary=5000),
        generate={**_GREEDY, "do_sample": True, "top_k": 20},
        held_out=True,
    ),
    "bart-beams": Case(
        model=_transformers(
            "BartForConditionalGeneration",
            "BartConfig",
            d_model=256,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=512,
            decoder_ffn_dim=512,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            vocab_size=4000,
        ),
        batch=_tokens(2, 60, vocabulary=4000),
        generate={**_GREEDY, "num_beams": 3},
        held_out=True,
    ),
}
