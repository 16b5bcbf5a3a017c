"""The chart of models of 2016 (arXiv 1605.07678), redone for memory.

For each model: what training takes per image, and the largest batch on a card.

    python benchmarks/model_chart.py [--only resnet50 vit_b_16] [--out FOLDER]
    python benchmarks/model_chart.py --resume     # go on with an interrupted run
    python benchmarks/model_chart.py --draw       # only the table and the pictures

Needs torchvision; no GPU, no network, no weights. Every model lies on the meta device and one
training step of it is traced: images of the size at which its accuracy was measured, cross entropy
(with the auxiliary heads of GoogLeNet and Inception at the weights of their papers), SGD with
momentum, in fp32 and in bf16-mixed. Accuracy, parameters and operations are torchvision's own
metadata, of the newest weights that were trained on ImageNet-1K alone.

*Memory per image* is the slope of the predicted peak of allocated memory between half the suggested
batch and the suggested batch. *Suggested* is `memcallback.suggest_batch_size` with its headroom of
5 % and any batch size: the largest with which the allocator never runs short. *Limit* keeps nothing
free and lets the allocator give back its cache and try again.

Data and table go to `benchmarks/results/cpu-<date>/`, the pictures to `docs/images/`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import latest_result, not_reported, results_folder, today
from model_chart_pictures import draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from memcallback import TrainingStep, __version__, format_bytes, predict, suggest_batch_size
from memcallback.core.document import Table
from memcallback.cuda.convolution.cudnn import version as cudnn_version
from memcallback.devices.catalogue import find_device

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
DEVICE = "NVIDIA GeForce RTX 4090"
PRECISIONS = ("32-true", "bf16-mixed")
NOT_REPORTED = (
    "measurements: everything here is predicted",
    "other optimizers, other image sizes, and accuracies of recipes with more data",
)
TRACED_BATCH_SIZE = 16
MODELS = {
    "AlexNet": ("alexnet",),
    "SqueezeNet": ("squeezenet1_1",),
    "VGG": ("vgg11", "vgg16", "vgg19"),
    "GoogLeNet, Inception": ("googlenet", "inception_v3"),
    "ResNet": (
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "wide_resnet50_2",
        "resnext50_32x4d",
    ),
    "DenseNet": ("densenet121", "densenet169"),
    "ShuffleNet": ("shufflenet_v2_x1_0", "shufflenet_v2_x2_0"),
    "MobileNet, MNASNet": (
        "mnasnet1_0",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "mobilenet_v3_large",
    ),
    "EfficientNet": ("efficientnet_b0", "efficientnet_b1", "efficientnet_b3", "efficientnet_v2_s"),
    "RegNet": ("regnet_y_400mf", "regnet_y_1_6gf", "regnet_y_8gf"),
    "ViT": ("vit_b_32", "vit_b_16", "vit_l_16"),
    "Swin": ("swin_t", "swin_s", "swin_b"),
    "ConvNeXt": ("convnext_tiny", "convnext_small", "convnext_base"),
}
#: What the auxiliary heads count (Szegedy et al. 2014, section 5; torchvision's own training of
#: Inception).
AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What training in one precision takes.

    Attributes:
        memory_per_image_bytes: Slope of the predicted peak of allocated memory over the batch size,
            at the suggested batch.
        suggested_batch_size: The largest without a retry, with the headroom; 0 if not one image
            fits.
        limit_batch_size: The largest at all.
        peak_allocated_bytes: Predicted, at the suggested batch.
        peak_reserved_bytes: The same of reserved memory.
    """

    memory_per_image_bytes: int
    suggested_batch_size: int
    limit_batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A point of the chart.

    Attributes:
        name: Its name in torchvision.
        family: Whose colour it has.
        weights: The weights whose accuracy it is.
        accuracy_pct: Top 1 on ImageNet-1K.
        num_parameters: How many.
        giga_multiply_adds: Of the forward pass of one image (torchvision's `_ops`).
        image_size: Height and width of the images, in pixels.
        trainings: By precision.
    """

    name: str
    family: str
    weights: str
    accuracy_pct: float
    num_parameters: int
    giga_multiply_adds: float
    image_size: int
    trainings: dict[str, Training]


def weights_of(name: str) -> Any:
    """The newest weights that were trained on ImageNet-1K alone (SWAG's were not)."""
    from torchvision.models import get_model_weights

    return [
        weights for weights in get_model_weights(name) if weights.name.startswith("IMAGENET1K_V")
    ][-1]


def loss_of(name: str) -> Any:
    """The loss of a model, with its auxiliary heads."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, classes = batch
        outputs = model(images)
        if name not in AUXILIARY_WEIGHTS:
            return cross_entropy(outputs, classes)
        main, *auxiliary = (cross_entropy(output, classes) for output in outputs)
        return main + AUXILIARY_WEIGHTS[name] * sum(auxiliary, torch.zeros_like(main))

    return loss


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD as the models were trained."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def training_step(name: str, precision: str) -> TrainingStep:
    """One training step of a model, on the meta device."""
    from torchvision.models import get_model

    options = {"init_weights": False} if name in AUXILIARY_WEIGHTS else {}
    size = weights_of(name).transforms().crop_size[0]
    # RegNet works out its widths with tensors, which the meta device cannot.
    model = get_model(name, weights=None, **options).train().to("meta")
    with torch.device("meta"):
        batch = (
            torch.zeros(TRACED_BATCH_SIZE, 3, size, size),
            torch.zeros(TRACED_BATCH_SIZE, dtype=torch.long),
        )
    return TrainingStep(model, batch, loss=loss_of(name), optimizer=momentum, precision=precision)


def training(name: str, precision: str) -> tuple[Training, tuple[str, ...]]:
    """What training takes, and what was assumed."""
    step = training_step(name, precision)
    advice = suggest_batch_size(step, device=DEVICE, multiple_of=1)
    size = advice.batch_size
    prediction = predict(step, device=DEVICE)
    at, below = prediction.at(max(2, size)), prediction.at(max(1, size // 2))
    slope = (at.peak_allocated_bytes - below.peak_allocated_bytes) / (
        at.batch_size - below.batch_size
    )
    found = Training(
        memory_per_image_bytes=round(slope),
        suggested_batch_size=size,
        limit_batch_size=advice.limit or 0,
        peak_allocated_bytes=at.peak_allocated_bytes,
        peak_reserved_bytes=at.peak_reserved_bytes or 0,
    )
    return (
        found,
        prediction.caveats,
    )  # that a size is far from those traced is none: the suggestion was traced itself


def model(name: str, family: str) -> tuple[Model, tuple[str, ...]]:
    """A point of the chart, and what was assumed in it."""
    weights = weights_of(name)
    found = {precision: training(name, precision) for precision in PRECISIONS}
    return Model(
        name=name,
        family=family,
        weights=weights.name,
        accuracy_pct=weights.meta["_metrics"]["ImageNet-1K"]["acc@1"],
        num_parameters=weights.meta["num_params"],
        giga_multiply_adds=weights.meta["_ops"],
        image_size=weights.transforms().crop_size[0],
        trainings={precision: one for precision, (one, _) in found.items()},
    ), tuple(dict.fromkeys(caveat for _, caveats in found.values() for caveat in caveats))


def document(only: list[str], there: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The data after each model.

    Args:
        only: The models that are wanted; none for all.
        there: The data of a run that was broken off, whose models are kept.
    """
    caveats, points = (
        list(there.get("caveats", [])),
        {one["name"]: one for one in there.get("models", [])},
    )
    wanted = [
        (name, family)
        for family, names in MODELS.items()
        for name in names
        if not only or name in only
    ]
    for number, (name, family) in enumerate(wanted, start=1):
        if name not in points:
            print(f"{number} of {len(wanted)}: {name}", file=sys.stderr, flush=True)
            found, said = model(name, family)
            points[name] = asdict(found)
            caveats += [caveat for caveat in said if caveat not in caveats]
        in_order = [points[name] for name, _ in wanted if name in points]
        yield {"environment": environment(), "caveats": caveats, "models": in_order}


def environment() -> dict[str, Any]:
    """On what it was predicted."""
    import torchvision

    card, version = find_device(DEVICE), cudnn_version()
    return {
        "device": f"{card.name}, {format_bytes(card.capacity_bytes or 0)} (target of the "
        "prediction; this machine has none)",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "convolution_workspaces": "estimated: no cuDNN was installed"
        if version is None
        else f"reported by cuDNN {version}",
        "python": platform.python_version(),
        "memcallback": __version__,
        "date": today(),
        "command": "python benchmarks/model_chart.py",
    }


def to_markdown(data: dict[str, Any]) -> str:
    """The data as a page."""
    lines = ["# Training memory per image, and the largest batch on a card of 24 GiB", ""]
    lines += [f"- {name}: {value}" for name, value in data["environment"].items()]
    lines += [
        "",
        "Predicted, not measured. `benchmarks/model_chart.py` says what the columns mean. Assumed:",
        "",
    ]
    lines += [f"- {caveat}" for caveat in data["caveats"]]
    rows = [
        (_cells(one))
        for one in sorted(data["models"], key=lambda one: (one["family"], one["accuracy_pct"]))
    ]
    columns: tuple[str, ...] = (
        "model",
        "family",
        "top 1, %",
        "parameters, M",
        "multiply-adds, G",
        "image",
    )
    for what in ("MiB an image", "suggested", "limit"):
        columns += tuple(f"{what}, {precision}" for precision in PRECISIONS)
    title = "SGD with momentum; image sizes are those at which the accuracy was measured"
    table = Table(
        title=title, columns=columns, rows=tuple(rows), left_columns=frozenset({"family"})
    )
    return (
        "\n".join(lines)
        + "\n\n"
        + table.to_markdown()
        + "\n".join(["", *not_reported(NOT_REPORTED), ""])
    )


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    trainings = [one["trainings"][precision] for precision in PRECISIONS]
    return (
        one["name"],
        one["family"],
        f"{one['accuracy_pct']:.2f}",
        f"{one['num_parameters'] / 1e6:.1f}",
        f"{one['giga_multiply_adds']:.2f}",
        str(one["image_size"]),
        *(f"{found['memory_per_image_bytes'] / 2**20:.1f}" for found in trainings),
        *(str(found["suggested_batch_size"]) for found in trainings),
        *(str(found["limit_batch_size"]) for found in trainings),
    )


def main() -> None:
    """Predict, write, draw."""
    parser = argparse.ArgumentParser(
        description="Training memory per image of torchvision's models, and their largest batch on "
        "a card."
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="these models alone; goes well with --out",
    )
    parser.add_argument(
        "--out", type=Path, help="a folder for everything; by default the committed places"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the models that are in the newest data already"
    )
    parser.add_argument(
        "--draw",
        action="store_true",
        help="predict nothing: the table and the pictures from the data that is there",
    )
    options = parser.parse_args()
    results, images = options.out or results_folder("cpu"), options.out or IMAGES
    if (options.draw or options.resume) and not options.out:
        results = latest_result("cpu", "models.json").parent
    results.mkdir(parents=True, exist_ok=True)
    data = results / "models.json"
    there = (
        json.loads(data.read_text()) if options.draw or (options.resume and data.exists()) else {}
    )
    for found in () if options.draw else document(options.only, there):
        there = found
        data.write_text(json.dumps(found, indent=1) + "\n")
    (results / "models.md").write_text(to_markdown(there))
    draw(there["models"], images)


if __name__ == "__main__":
    main()
