"""Layer and LayerTable."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memcallback.core.document import Document, Printable, Table
from memcallback.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One call of a layer.

    A layer is a module without child modules, or a function called outside of such a module. A
    module with children has a row of its own only where it owns parameters that nothing used.

    Attributes:
        name: The module's FQN, "" for the root; for a function `<FQN of the module that calls
            it>/<function>`.
        kind: The module's class name, such as `Conv2d`, or the function's name, such as `relu`.
        output_shape: Of the first tensor in the output; None if there is none.
        num_parameters: Elements of its parameters. A parameter that several layers use counts at
            the first that uses it.
        parameter_bytes: Their bytes, counted alike.
        output_bytes: Storages that the call made and returned. 0 for a view and for an in-place
            operation.
        num_flops: As torch.utils.flop_counter counts: two for a multiply-add of matrix products,
            convolutions and attention, and 0 for what it has no formula for, such as activations,
            pooling and normalisation.
        num_multiply_adds: Half of `num_flops`.
        read_bytes: Parameters and other tensors from outside of the call that it read, each once
            and as a whole.
        written_bytes: What it returned in new storages, and what it changed in place, each once.
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
        layers: One for every call. Modules whose parameters no call used come last.
        saved_bytes: Storages made in the pass that autograd keeps for the backward pass;
            parameters, buffers and inputs are not among them. 0 in a pass without gradients.
        kept_bytes: Storages of all outputs, and what else autograd keeps (the mask of a dropout,
            say).
    """

    layers: tuple[Layer, ...]
    saved_bytes: int
    kept_bytes: int

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def output_bytes(self) -> int:
        """Bytes of all outputs, as if every one were kept."""
        return sum(layer.output_bytes for layer in self.layers)

    @property
    def num_flops(self) -> int:
        """Floating-point operations; see `Layer.num_flops` for what counts."""
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
        """The layer's part of `output_bytes`, from 0 to 1; 0 where there are no outputs at all."""
        return layer.output_bytes / self.output_bytes if self.output_bytes else 0.0

    def to_table(self) -> Table:
        """The table to show, with the sums in the last row."""
        rows = [
            (
                layer.name or "(root)",
                layer.kind,
                _shape_text(layer.output_shape),
                *_figures(layer, self.share(layer)),
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
            rows=(*rows, ("total", "", "", *_figures(self, total_share))),
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


def _figures(source: Layer | LayerTable, share: float) -> tuple[str, ...]:
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
