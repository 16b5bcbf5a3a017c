"""The architectures with data and losses: what is trained, before it is said how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import convolutional, others, transformers

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Tensor]
ParametersOf = Callable[[Any], Iterable[nn.Parameter]]

RNN_IS_A_GUESS = (
    "cuDNN's workspace and reserve for recurrent layers are guesses on a virtual device"
)
BATCH_NORM_IS_A_GUESS = (
    "cuDNN's reserve for channels_last batch norm is a guess on a virtual device"
)
SPARSE_READS_VALUES = (
    "how large a sparse gradient becomes depends on how many of its rows are equal, which a "
    "virtual device does not know"
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data.

    Attributes:
        family: What the results are split by.
        architecture: The name.
        model: Makes the model.
        batch: Makes the batch, on the CPU.
        losses: One function of model and batch for each optimizer; nearly always one.
        parameters: For each of them, which of the model's parameters it trains.
        has_batch_norm: Whether there is any.
        left_out: Why figures of a virtual device prove nothing here; None if they do.
    """

    family: str
    architecture: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    losses: tuple[Loss, ...]
    parameters: tuple[ParametersOf, ...] = (nn.Module.parameters,)
    has_batch_norm: bool = False
    left_out: str | None = None


# Batches.


def images(batch_size: int, size: int = 224, *, num_classes: int = 1000) -> Callable[[], Batch]:
    """Images with classes."""
    return lambda: {
        "image": torch.randn(batch_size, 3, size, size),
        "label": torch.randint(num_classes, (batch_size,)),
    }


def segmented_images(batch_size: int, size: int, *, num_classes: int = 21) -> Callable[[], Batch]:
    """Images with a class for each pixel."""
    return lambda: {
        "image": torch.randn(batch_size, 3, size, size),
        "label": torch.randint(num_classes, (batch_size, size, size)),
    }


def videos(batch_size: int, num_frames: int, size: int) -> Callable[[], Batch]:
    """Videos with classes."""
    return lambda: {
        "image": torch.randn(batch_size, 3, num_frames, size, size),
        "label": torch.randint(400, (batch_size,)),
    }


def features(batch_size: int, width: int, *, num_classes: int = 100) -> Callable[[], Batch]:
    """Vectors with classes."""
    return lambda: {
        "image": torch.randn(batch_size, width),
        "label": torch.randint(num_classes, (batch_size,)),
    }


def texts(
    batch_size: int, length: int, *, vocabulary: int, num_classes: int | None = None
) -> Callable[[], Batch]:
    """Texts; a label for each text, or for each word if there are no classes."""

    def make() -> Batch:
        tokens = torch.randint(1, vocabulary, (batch_size, length))
        is_word = torch.arange(length) < torch.randint(length // 2, length + 1, (batch_size, 1))
        label = tokens.clone() if num_classes is None else torch.randint(num_classes, (batch_size,))
        return {"tokens": tokens, "is_word": is_word, "label": label}

    return make


def token_sequences(batch_size: int, length: int, *, vocabulary: int) -> Callable[[], Batch]:
    """Texts of full length, for models that predict the next token."""
    return lambda: {"tokens": torch.randint(vocabulary, (batch_size, length + 1))}


def tagged_words(batch_size: int, length: int) -> Callable[[], Batch]:
    """Words with a tag for each."""
    return lambda: {
        "tokens": torch.randint(20000, (batch_size, length)),
        "label": torch.randint(50, (batch_size, length)),
    }


def translations(batch_size: int, length: int) -> Callable[[], Batch]:
    """Pairs of texts."""
    return lambda: {
        name: torch.randint(32128, (batch_size, length)) for name in ("source", "target", "label")
    }


def clicks(batch_size: int, *, num_rows: int = 200000, num_tables: int = 16) -> Callable[[], Batch]:
    """What a recommender sees."""
    return lambda: {
        "dense": torch.randn(batch_size, 13),
        "categories": torch.randint(num_rows, (num_tables, batch_size, 4)),
        "label": torch.rand(batch_size),
    }


def noise_and_images(batch_size: int) -> Callable[[], Batch]:
    """What a GAN needs."""
    return lambda: {
        "image": torch.randn(batch_size, 3, 64, 64),
        "noise": torch.randn(batch_size, 128, 1, 1),
    }


def recordings(batch_size: int, length: int) -> Callable[[], Batch]:
    """Spectrograms with texts; the lengths are plain numbers."""
    return lambda: {
        "spectrogram": torch.randn(batch_size, 80, length),
        "letters": torch.randint(1, 32, (batch_size, length // 16)),
        "num_frames": (length // 2,) * batch_size,
        "num_letters": (length // 16,) * batch_size,
    }


def samples(batch_size: int, length: int) -> Callable[[], Batch]:
    """Sound as levels."""
    return lambda: {"samples": torch.randint(256, (batch_size, length + 1))}


def graph(num_nodes: int, num_edges: int) -> Callable[[], Batch]:
    """One graph with a class for each node."""
    return lambda: {
        "nodes": torch.randn(num_nodes, 128),
        "edges": torch.randint(num_nodes, (2, num_edges)),
        "label": torch.randint(40, (num_nodes,)),
    }


def captioned_images(batch_size: int) -> Callable[[], Batch]:
    """Images with texts."""
    return lambda: {
        "image": torch.randn(batch_size, 3, 224, 224),
        "tokens": torch.randint(10000, (batch_size, 77)),
    }


# Losses.


def classify(model: Any, batch: Batch) -> Tensor:
    """One class for each image, or for each of its pixels."""
    return F.cross_entropy(model(batch["image"]), batch["label"])


def classify_smoothed(model: Any, batch: Batch) -> Tensor:
    """The same with smoothed labels."""
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)


def next_token(model: Any, batch: Batch) -> Tensor:
    """Each token from those before it."""
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["tokens"][:, 1:].reshape(-1))


def masked_words(model: Any, batch: Batch) -> Tensor:
    """Each word from the others."""
    logits = model(batch["tokens"], batch["is_word"])
    return F.cross_entropy(logits.flatten(0, 1), batch["label"].flatten(), ignore_index=0)


def classify_text(model: Any, batch: Batch) -> Tensor:
    """One class for each text."""
    return F.cross_entropy(model(batch["tokens"], batch["is_word"]), batch["label"])


def tag(model: Any, batch: Batch) -> Tensor:
    """A tag for each word."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["label"].flatten())


def translate(model: Any, batch: Batch) -> Tensor:
    """The other text."""
    return F.cross_entropy(
        model(batch["source"], batch["target"]).flatten(0, 1), batch["label"].flatten()
    )


def click(model: Any, batch: Batch) -> Tensor:
    """Clicked or not."""
    return F.binary_cross_entropy_with_logits(
        model(batch["dense"], batch["categories"]), batch["label"]
    )


def discriminate(model: Any, batch: Batch) -> Tensor:
    """A GAN's discriminator: images are real, generated ones are not."""
    real = model.discriminator(batch["image"])
    fake = model.discriminator(model.generator(batch["noise"]).detach())
    return F.binary_cross_entropy_with_logits(
        real, torch.ones_like(real)
    ) + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))


def generate(model: Any, batch: Batch) -> Tensor:
    """A GAN's generator: what it makes is taken for real."""
    fake = model.discriminator(model.generator(batch["noise"]))
    return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))


def reconstruct(model: Any, batch: Batch) -> Tensor:
    """The image again."""
    return F.mse_loss(model(batch["image"]), batch["image"])


def reconstruct_variational(model: Any, batch: Batch) -> Tensor:
    """The image again, and a normal distribution between."""
    image, mean, log_variance = model(batch["image"])
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(dim=1).mean()
    loss: Tensor = F.mse_loss(image, batch["image"], reduction="sum") / len(mean) + divergence
    return loss


def transcribe(model: Any, batch: Batch) -> Tensor:
    """The letters of a recording."""
    return F.ctc_loss(
        model(batch["spectrogram"]),
        batch["letters"],
        batch["num_frames"],
        batch["num_letters"],
        zero_infinity=True,
    )


def next_sample(model: Any, batch: Batch) -> Tensor:
    """Each sample from those before it."""
    return F.cross_entropy(model(batch["samples"][:, :-1]), batch["samples"][:, 1:])


def classify_nodes(model: Any, batch: Batch) -> Tensor:
    """A class for each node."""
    return F.cross_entropy(model(batch["nodes"], batch["edges"]), batch["label"])


def match(model: Any, batch: Batch) -> Tensor:
    """Which text belongs to which image, both ways."""
    logits = model(batch["image"], batch["tokens"])
    label = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, label) + F.cross_entropy(logits.t(), label)) / 2


# Models with their data. Sizes: some hundreds of MiB to about 6 GiB on the device.


def _lora_gpt() -> nn.Module:
    return transformers.with_lora(transformers.Gpt(), names=("qkv", "out"))


def _two_towers() -> nn.Module:
    text = transformers.EncoderTower(width=512, depth=6, num_heads=8, vocabulary=10000)
    return others.TwoTowers(transformers.ViT(num_classes=512), text)


def _resnet(
    depths: tuple[int, ...],
    *,
    is_bottleneck: bool,
    norm: convolutional.Norm = convolutional.batch_norm,
) -> Callable[[], nn.Module]:
    return lambda: convolutional.ResNet(depths, is_bottleneck=is_bottleneck, norm=norm)


_DEEP = (3, 4, 6, 3)

_ALL = (
    Workload(
        family="cnn", architecture="vgg16", model=convolutional.vgg, batch=images(16),
        losses=(classify,),
    ),
    Workload(
        family="cnn-bn", architecture="resnet18", model=_resnet((2, 2, 2, 2), is_bottleneck=False),
        batch=images(32), losses=(classify,), has_batch_norm=True,
    ),
    Workload(
        family="cnn-bn", architecture="resnet50", model=_resnet(_DEEP, is_bottleneck=True),
        batch=images(32), losses=(classify,), has_batch_norm=True,
    ),
    Workload(
        family="cnn", architecture="resnet50-gn",
        model=_resnet(_DEEP, is_bottleneck=True, norm=convolutional.group_norm), batch=images(16),
        losses=(classify,),
    ),
    Workload(
        family="cnn-bn", architecture="mobilenet-v2", model=convolutional.mobilenet,
        batch=images(32), losses=(classify,), has_batch_norm=True
    ),
    Workload(
        family="cnn-bn", architecture="efficientnet",
        model=lambda: convolutional.mobilenet(squeeze_excite=True), batch=images(32),
        losses=(classify_smoothed,), has_batch_norm=True,
    ),
    Workload(
        family="cnn-bn", architecture="densenet121", model=convolutional.densenet, batch=images(16),
        losses=(classify,), has_batch_norm=True
    ),
    Workload(
        family="unet", architecture="unet", model=lambda: convolutional.UNet(num_channels=32),
        batch=segmented_images(4, 256), losses=(classify,), has_batch_norm=True,
    ),
    Workload(
        family="cnn", architecture="convnext", model=convolutional.convnext, batch=images(16),
        losses=(classify,),
    ),
    Workload(
        family="cnn", architecture="autoencoder", model=convolutional.autoencoder,
        batch=images(32, 128), losses=(reconstruct,)
    ),
    Workload(
        family="cnn-bn", architecture="video3d", model=convolutional.video_network,
        batch=videos(4, 16, 112), losses=(classify,), has_batch_norm=True,
    ),
    Workload(
        family="vision-transformer", architecture="vit-s16", model=transformers.ViT,
        batch=images(32), losses=(classify,),
    ),
    Workload(
        family="vision-transformer", architecture="swin", model=transformers.Swin, batch=images(16),
        losses=(classify,),
    ),
    Workload(
        family="mixer", architecture="mlp-mixer", model=transformers.Mixer, batch=images(32),
        losses=(classify,),
    ),
    Workload(
        family="language-model", architecture="gpt2", model=transformers.Gpt,
        batch=token_sequences(4, 512, vocabulary=50257), losses=(next_token,),
    ),
    Workload(
        family="language-model", architecture="gpt2-dropout",
        model=lambda: transformers.Gpt(dropout=0.1),
        batch=token_sequences(4, 512, vocabulary=50257), losses=(next_token,),
    ),
    Workload(
        family="language-model", architecture="bert", model=transformers.Bert,
        batch=texts(16, 128, vocabulary=30522), losses=(masked_words,)
    ),
    Workload(
        family="language-model", architecture="torch-encoder", model=transformers.EncoderClassifier,
        batch=texts(32, 128, vocabulary=30000, num_classes=20), losses=(classify_text,),
    ),
    Workload(
        family="language-model", architecture="llama", model=transformers.Llama,
        batch=token_sequences(2, 1024, vocabulary=32000), losses=(next_token,),
    ),
    Workload(
        family="language-model", architecture="t5", model=transformers.T5,
        batch=translations(16, 128), losses=(translate,),
    ),
    Workload(
        family="lora", architecture="gpt2-lora", model=_lora_gpt,
        batch=token_sequences(4, 512, vocabulary=50257), losses=(next_token,)
    ),
    Workload(
        family="recurrent", architecture="lstm", model=lambda: others.RecurrentTagger(nn.LSTM),
        batch=tagged_words(64, 128), losses=(tag,), left_out=RNN_IS_A_GUESS,
    ),
    Workload(
        family="recurrent", architecture="gru", model=lambda: others.RecurrentTagger(nn.GRU),
        batch=tagged_words(64, 128), losses=(tag,), left_out=RNN_IS_A_GUESS,
    ),
    Workload(
        family="recurrent", architecture="lstm-cell", model=lambda: others.CellTagger(nn.LSTMCell),
        batch=tagged_words(128, 64), losses=(tag,)
    ),
    Workload(
        family="recurrent", architecture="gru-cell", model=lambda: others.CellTagger(nn.GRUCell),
        batch=tagged_words(128, 64), losses=(tag,)
    ),
    Workload(
        family="recommender", architecture="dlrm", model=others.Dlrm, batch=clicks(8192),
        losses=(click,),
    ),
    Workload(
        family="recommender", architecture="dlrm-sparse", model=lambda: others.Dlrm(is_sparse=True),
        batch=clicks(8192), losses=(click,), left_out=SPARSE_READS_VALUES,
    ),
    Workload(
        family="gan", architecture="dcgan", model=others.Gan, batch=noise_and_images(128),
        losses=(discriminate, generate),
        parameters=(
            lambda model: model.discriminator.parameters(),
            lambda model: model.generator.parameters(),
        ),
        has_batch_norm=True,
    ),
    Workload(
        family="vae", architecture="vae", model=others.Vae, batch=images(128, 64),
        losses=(reconstruct_variational,),
    ),
    Workload(
        family="mlp", architecture="mlp", model=others.mlp, batch=features(2048, 1024),
        losses=(classify,),
    ),
    Workload(
        family="graph", architecture="graph-network", model=others.GraphNetwork,
        batch=graph(50000, 400000), losses=(classify_nodes,),
    ),
    Workload(
        family="speech", architecture="speech-ctc", model=transformers.SpeechEncoder,
        batch=recordings(16, 1000), losses=(transcribe,)
    ),
    Workload(
        family="speech", architecture="wavenet", model=others.WaveNet, batch=samples(4, 16000),
        losses=(next_sample,),
    ),
    Workload(
        family="two-towers", architecture="clip", model=_two_towers, batch=captioned_images(32),
        losses=(match,),
    ),
)  # fmt: skip

WORKLOADS = {workload.architecture: workload for workload in _ALL}
