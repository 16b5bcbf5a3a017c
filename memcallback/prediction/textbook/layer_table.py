"""LayerTable: the layers of a forward pass with their parameters, outputs and FLOPs, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memcallback.core.document import Document, Printable, Table
from memcallback.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of a layer.

    A layer is a module without child modules, or a function called outside of such a module. A
    module with children has a row only for parameters of its own that no layer used.

    Attributes:
        name: The module's FQN, "" for the root; for a function `<FQN of the module that calls
            it>/<function>`.
        kind: The module's class name, such as `Conv2d`, or the function's name, such as `relu`.
        output_shape: Shape of the first tensor in the output; None without tensors.
        num_parameters: Elements of its parameters. A shared parameter counts at the first layer
            that uses it.
        parameter_bytes: Bytes of the same parameters.
        output_bytes: Bytes of new storages in the output; 0 for views and in-place operations.
        num_flops: Floating-point operations by torch.utils.flop_counter: two for a multiply-add of
            matrix products, convolutions and attention; 0 for operators without a formula, such as
            activations, pooling and normalisation.
        num_multiply_adds: Half of `num_flops`.
        read_bytes: Bytes of parameters and other tensors from outside that it read, each once.
        written_bytes: Bytes of new storages in the output and of tensors changed in place, each
            once.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    num_parameters: int
    parameter_bytes: int
    output_bytes: int
    num_flops: int
    num_multiply_adds: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerTable(Printable):
    """The layers of one forward pass, in the order in which they ran, and their sums.

    Attributes:
        layers: One for each call; modules with unused parameters come last.
        saved_bytes: Bytes of new storages that autograd saves for the backward pass, without
            parameters, buffers and inputs; 0 without gradients.
        kept_bytes: Bytes of all outputs, and of everything else that autograd saves, such as a
            dropout's mask.
    """

    layers: tuple[Layer, ...]
    saved_bytes: int
    kept_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; shared ones count once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters; shared ones count once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(layer.output_bytes for layer in self.layers)

    @property
    def num_flops(self) -> int:
        """Floating-point operations, counted as `Layer.num_flops`."""
        return sum(layer.num_flops for layer in self.layers)

    @property
    def num_multiply_adds(self) -> int:
        """Half of `num_flops`."""
        return sum(layer.num_multiply_adds for layer in self.layers)

    @property
    def read_bytes(self) -> int:
        """Bytes that the layers read."""
        return sum(layer.read_bytes for layer in self.layers)

    @property
    def written_bytes(self) -> int:
        """Bytes that the layers wrote."""
        return sum(layer.written_bytes for layer in self.layers)

    def share(self, layer: Layer) -> float:
        """The layer's part of `output_bytes`, from 0 to 1; 0 without outputs."""
        return layer.output_bytes / self.output_bytes if self.output_bytes else 0.0

    def to_table(self) -> Table:
        """The table, with the sums in the last row."""
        rows = [
            (
                layer.name or "(root)",
                layer.kind,
                _shape_text(layer.output_shape),
                *_values(layer, self.share(layer)),
            )
            for layer in self.layers
        ]
        total_share = sum(self.share(layer) for layer in self.layers)
        return Table(
            title=f"Layers (saved for backward: {format_bytes(self.saved_bytes)})",
            columns=(
                "name",
                "kind",
                "output shape",
                "parameters",
                "parameter size",
                "output size",
                "share of outputs",
                "MAdd",
                "FLOPs",
                "read",
                "written",
            ),
            rows=(*rows, ("total", "", "", *_values(self, total_share))),
            left_columns=frozenset({"kind", "output shape"}),
            totals=True,
        )

    def document(self) -> Document:
        """The table alone."""
        return Document(self.to_table())

    def to_dict(self) -> dict[str, Any]:
        """The table for JSON: a list of layers and the sums, the unit in every key."""
        layers = [
            {**asdict(layer), "output_share_pct": 100 * self.share(layer)} for layer in self.layers
        ]
        total_names = (
            "num_parameters",
            "parameter_bytes",
            "output_bytes",
            "num_flops",
            "num_multiply_adds",
            "read_bytes",
            "written_bytes",
        )
        return {
            "layers": layers,
            "total": {name: getattr(self, name) for name in total_names},
            "saved_bytes": self.saved_bytes,
            "kept_bytes": self.kept_bytes,
        }


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) if shape else "-" if shape is None else "scalar"


def _values(source: Layer | LayerTable, share: float) -> tuple[str, ...]:
    return (
        f"{source.num_parameters:,}",
        format_bytes(source.parameter_bytes),
        format_bytes(source.output_bytes),
        f"{100 * share:.1f} %",
        f"{source.num_multiply_adds:,}",
        f"{source.num_flops:,}",
        format_bytes(source.read_bytes),
        format_bytes(source.written_bytes),
    )
