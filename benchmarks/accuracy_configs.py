"""The configurations of the accuracy proof, in a fixed order.

They are architectures x optimizers x precisions x ways to save memory.

A configuration makes everything on the CPU, so that the same objects can be measured on a device
and predicted without one. `training_loop.py` says in which order a step runs, `models/workloads.py`
what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from models.common import Checkpointing, Stack
from models.workloads import BATCH_NORM_IS_A_GUESS, WORKLOADS, Batch, Loss, ParametersOf, Workload
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=1e-4
    ),
    "nesterov-forloop": lambda parameters: torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, nesterov=True, foreach=False
    ),
    "sgd-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, amsgrad=True),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-forloop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    # Three iterations of one evaluation each, whatever the values are; the history is full in the
    # second step.
    "lbfgs": lambda parameters: torch.optim.LBFGS(
        parameters,
        lr=1e-3,
        max_iter=3,
        max_eval=100,
        tolerance_grad=-1.0,
        tolerance_change=-1.0,
        history_size=3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is trained, all of it on the CPU.

    Attributes:
        model: The model, in training mode.
        batch: Tensors by name.
        losses: One function of model and batch for each optimizer; nearly always one.
        optimizers: As many functions from the model to a new optimizer.
    """

    model: nn.Module
    batch: Batch
    losses: tuple[Loss, ...]
    optimizers: tuple[Callable[[Any], torch.optim.Optimizer], ...]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to train one workload.

    Attributes:
        workload: What is trained.
        optimizer: A key of `OPTIMIZERS`.
        precision: Lightning's name for it.
        accumulate: Micro-batches in an update.
        clip_grad_norm: The largest norm of the gradients; None for no clipping.
        checkpointing: Of the model's blocks.
        channels_last: Whether model and images have that memory format.
        name: All of this in one word.
    """

    workload: Workload
    optimizer: str
    precision: str
    accumulate: int = 1
    clip_grad_norm: float | None = None
    checkpointing: Checkpointing = "none"
    channels_last: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        words = [self.workload.architecture, self.optimizer, self.precision]
        words += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        words += ["clip"] if self.clip_grad_norm is not None else []
        words += (
            [f"checkpoint-{self.checkpointing}".replace("_", "-")]
            if self.checkpointing != "none"
            else []
        )
        words += ["channels-last"] if self.channels_last else []
        object.__setattr__(self, "name", "-".join(words))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that autocast computes in, None where it is off."""
        return AUTOCAST.get(self.precision)

    @property
    def has_grad_scaler(self) -> bool:
        """Whether the loss is scaled."""
        return self.precision == "16-mixed"

    @property
    def has_closure(self) -> bool:
        """Whether the optimizer runs forward and backward pass itself."""
        return self.optimizer == "lbfgs"

    @property
    def left_out(self) -> str | None:
        """Why figures of a virtual device prove nothing here; None if they do."""
        if self.channels_last and self.workload.has_batch_norm:
            return BATCH_NORM_IS_A_GUESS
        return self.workload.left_out

    def make(self, *, initialise: bool = True) -> Parts:
        """Make everything anew.

        Args:
            initialise: Whether the parameters get random values; without, a large model is made at
                once and takes no memory.
        """
        torch.manual_seed(0)
        with nullcontext() if initialise else _WithoutInitialisation():  # type: ignore[no-untyped-call]
            model = self.workload.model().train()
        batch = self.workload.batch()
        for module in model.modules():
            if isinstance(module, Stack):
                module.checkpointing = self.checkpointing
        if self.precision == "bf16-true":
            model = model.to(torch.bfloat16)
            batch = {name: _to_bfloat16(value) for name, value in batch.items()}
        if self.channels_last:
            model = cast("Any", model).to(memory_format=torch.channels_last)
            batch = {name: _to_channels_last(value) for name, value in batch.items()}
        optimizers = tuple(
            _maker(self.optimizer, parameters_of) for parameters_of in self.workload.parameters
        )
        return Parts(model=model, batch=batch, losses=self.workload.losses, optimizers=optimizers)


def _maker(optimizer: str, parameters_of: ParametersOf) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: OPTIMIZERS[optimizer](
        [parameter for parameter in parameters_of(model) if parameter.requires_grad]
    )


def _to_bfloat16(value: Any) -> Any:
    return (
        value.to(torch.bfloat16)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


def _to_channels_last(value: Any) -> Any:
    return (
        value.contiguous(memory_format=torch.channels_last)
        if isinstance(value, Tensor) and value.ndim == 4
        else value
    )


class _WithoutInitialisation(TorchDispatchMode):
    """Draw no random values: parameters keep what the operating system left in their memory."""

    _DRAWN = (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return args[0] if function in self._DRAWN else function(*args, **(kwargs or {}))


def _config(
    architecture: str, optimizer: str = "adamw", precision: str = "32-true", **options: Any
) -> Config:
    return Config(
        workload=WORKLOADS[architecture], optimizer=optimizer, precision=precision, **options
    )


_NON_REENTRANT: dict[str, Any] = {"checkpointing": "non_reentrant"}
_REENTRANT: dict[str, Any] = {"checkpointing": "reentrant"}
_CHANNELS_LAST: dict[str, Any] = {"channels_last": True}
_CLIP: dict[str, Any] = {"clip_grad_norm": 1.0}

#: The first are a cross-section of all.
CONFIGS: tuple[Config, ...] = (
    _config("resnet50", "momentum"),
    _config("resnet50", "adamw", "bf16-mixed"),
    _config("vgg16", "momentum"),
    _config("gpt2", "adamw"),
    _config("gpt2", "adamw", "bf16-mixed"),
    _config("gpt2", "adamw-fused", "16-mixed", **_CLIP),
    _config("bert", "adamw"),
    _config("llama", "adamw", "bf16-true"),
    _config("unet", "adam"),
    _config("vit-s16", "adamw", "bf16-mixed", **_CLIP),
    _config("mlp", "sgd"),
    _config("dcgan", "adam"),
    _config("vae", "adam", accumulate=2),
    _config("gpt2", "adamw", "bf16-mixed", **_NON_REENTRANT),
    _config("mlp", "lbfgs"),
    # Convolutional networks.
    _config("resnet50", "momentum", "16-mixed"),
    _config("resnet50", "adamw", "bf16-true"),
    _config("resnet50", "sgd-fused", **_CLIP),
    _config("resnet50", "adam", accumulate=2),
    _config("resnet50", "momentum", **_NON_REENTRANT),
    _config("resnet50", "momentum", "bf16-mixed", **_CHANNELS_LAST),
    _config("resnet18", "sgd"),
    _config("resnet18", "nesterov-forloop"),
    _config("resnet18", "adafactor"),
    _config("resnet18", "rmsprop", "bf16-mixed"),
    _config("resnet18", "lbfgs"),
    _config("resnet18", "adam-fused", "16-mixed", accumulate=2),
    _config("resnet50-gn", "adamw"),
    _config("resnet50-gn", "momentum", "16-mixed", **_CHANNELS_LAST),
    _config("resnet50-gn", "adamw-forloop", "bf16-mixed", **_CLIP),
    _config("vgg16", "sgd", "bf16-mixed"),
    _config("vgg16", "adamw", "16-mixed", **_CLIP),
    _config("vgg16", "adamw-fused", **_CHANNELS_LAST),
    _config("vgg16", "momentum", "bf16-true", accumulate=2),
    _config("mobilenet-v2", "rmsprop"),
    _config("mobilenet-v2", "momentum", "16-mixed"),
    _config("mobilenet-v2", "sgd-fused", **_REENTRANT),
    _config("mobilenet-v2", "adamw", "bf16-mixed", **_CHANNELS_LAST),
    _config("efficientnet", "rmsprop", "bf16-mixed"),
    _config("efficientnet", "adamw", **_NON_REENTRANT),
    _config("efficientnet", "adafactor", "bf16-true"),
    _config("densenet121", "momentum"),
    _config("densenet121", "adam", "16-mixed"),
    _config("densenet121", "sgd", **_NON_REENTRANT),
    _config("unet", "adamw", "bf16-mixed"),
    _config("unet", "momentum", "16-mixed", accumulate=2),
    _config("unet", "adamw-forloop", **_CLIP),
    _config("convnext", "adamw"),
    _config("convnext", "adamw-fused", "bf16-mixed", **_CLIP),
    _config("convnext", "adafactor", "16-mixed"),
    _config("convnext", "adamw", "bf16-mixed", **_CHANNELS_LAST),
    _config("convnext", "adamw", "bf16-true", **_REENTRANT),
    _config("autoencoder", "adam"),
    _config("autoencoder", "adam-amsgrad", "16-mixed"),
    _config("autoencoder", "momentum", "bf16-mixed", **_CHANNELS_LAST),
    _config("video3d", "momentum"),
    _config("video3d", "adamw", "bf16-mixed"),
    # Vision transformers and MLP-Mixer.
    _config("vit-s16", "adamw"),
    _config("vit-s16", "momentum", "16-mixed"),
    _config("vit-s16", "adamw-fused", "bf16-true", accumulate=2),
    _config("vit-s16", "adafactor", "bf16-mixed", **_REENTRANT),
    _config("swin", "adamw"),
    _config("swin", "adamw", "bf16-mixed", **_CLIP),
    _config("swin", "adamw-forloop", "16-mixed"),
    _config("swin", "adamw-fused", **_NON_REENTRANT),
    _config("mlp-mixer", "adamw"),
    _config("mlp-mixer", "adam-fused", "bf16-mixed", **_CLIP),
    _config("mlp-mixer", "momentum", "16-mixed", accumulate=4),
    _config("mlp-mixer", "sgd", "bf16-true", **_REENTRANT),
    # Language models.
    _config("gpt2", "adamw-fused"),
    _config("gpt2", "adamw-forloop"),
    _config("gpt2", "adafactor", "bf16-true"),
    _config("gpt2", "sgd", "16-mixed", **_REENTRANT),
    _config("gpt2", "adamw", "bf16-mixed", accumulate=4, **_CLIP),
    _config("gpt2-dropout", "adamw"),
    _config("gpt2-dropout", "adamw", "bf16-mixed"),
    _config("gpt2-dropout", "adamw-fused", "16-mixed", **_NON_REENTRANT),
    _config("bert", "adamw", "bf16-mixed", **_CLIP),
    _config("bert", "adamw-fused", "16-mixed"),
    _config("bert", "adafactor", accumulate=2),
    _config("bert", "adamw", "bf16-true", **_NON_REENTRANT),
    _config("torch-encoder", "adam"),
    _config("torch-encoder", "adamw", "bf16-mixed", **_CLIP),
    _config("torch-encoder", "adagrad"),
    _config("torch-encoder", "adam-fused", "16-mixed"),
    _config("llama", "adamw"),
    _config("llama", "adamw-fused", "bf16-mixed", **_CLIP),
    _config("llama", "adafactor", "bf16-true", **_NON_REENTRANT),
    _config("llama", "sgd", "bf16-true", accumulate=2),
    _config("t5", "adafactor"),
    _config("t5", "adamw", "bf16-mixed"),
    _config("t5", "adamw-forloop", "16-mixed", **_CLIP),
    _config("t5", "adam", "bf16-true", **_NON_REENTRANT),
    _config("gpt2-lora", "adamw"),
    _config("gpt2-lora", "adamw", "bf16-mixed", accumulate=2),
    _config("gpt2-lora", "adamw-fused", "bf16-true", **_NON_REENTRANT),
    _config("gpt2-lora", "momentum", "16-mixed", **_CLIP),
    # Recurrent networks.
    _config("lstm", "adam", **_CLIP),
    _config("lstm", "adam", "16-mixed"),
    _config("gru", "sgd"),
    _config("gru", "adamw", "bf16-mixed"),
    _config("lstm-cell", "adam", **_CLIP),
    _config("lstm-cell", "sgd", "bf16-mixed"),
    _config("lstm-cell", "rmsprop", "16-mixed"),
    _config("gru-cell", "adamw"),
    _config("gru-cell", "momentum", "16-mixed", **_CLIP),
    _config("gru-cell", "adamw-forloop", "bf16-true"),
    # The rest.
    _config("dlrm", "adagrad"),
    _config("dlrm", "sgd", "bf16-mixed"),
    _config("dlrm", "adam", "16-mixed", **_CLIP),
    _config("dlrm-sparse", "sgd"),
    _config("dcgan", "adam-fused", "bf16-mixed"),
    _config("dcgan", "adamw", "16-mixed"),
    _config("dcgan", "rmsprop", **_CLIP),
    _config("vae", "adam"),
    _config("vae", "adamw", "16-mixed"),
    _config("vae", "adam-amsgrad", "bf16-mixed", **_CHANNELS_LAST),
    _config("mlp", "momentum"),
    _config("mlp", "adam", "bf16-mixed"),
    _config("mlp", "adamw-fused", "16-mixed", **_CLIP),
    _config("mlp", "adafactor", "bf16-true"),
    _config("mlp", "adam-amsgrad", accumulate=4),
    _config("mlp", "adamw", **_REENTRANT),
    _config("graph-network", "adam"),
    _config("graph-network", "adamw", "bf16-mixed", **_NON_REENTRANT),
    _config("graph-network", "adagrad", "16-mixed"),
    _config("speech-ctc", "adamw"),
    _config("speech-ctc", "adamw-fused", "bf16-mixed", **_CLIP),
    _config("speech-ctc", "adam", "16-mixed", **_REENTRANT),
    _config("wavenet", "adam"),
    _config("wavenet", "adamw", "16-mixed"),
    _config("wavenet", "momentum", "bf16-true", **_CLIP),
    _config("clip", "adamw"),
    _config("clip", "adamw", "16-mixed", **_CLIP),
    _config("clip", "adamw-fused", "bf16-mixed", **_NON_REENTRANT),
)
