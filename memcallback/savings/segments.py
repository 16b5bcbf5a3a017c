"""How to cut a Sequential for checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memcallback.core.allocation_trace import Alloc, Event, not_freed, phase_events
from memcallback.core.types import Phase

#: How many numbers of segments are worth a trace of their own.
NUM_TRIED = 5


@dataclass(frozen=True)
class LayerBytes:
    """What a layer makes in a forward pass.

    Attributes:
        held_bytes: What of it stands when the pass ends.
        largest_bytes: The largest storage that it makes: its output, as a rule; 0 for a layer that
            only views its input.
    """

    held_bytes: int
    largest_bytes: int


def layer_bytes(
    events: Sequence[Event], name: str, layers: Sequence[str]
) -> tuple[LayerBytes, ...]:
    """What each layer of an `nn.Sequential` makes in the last forward pass of a trace."""
    *_, forward = ((), *phase_events(events, Phase.FORWARD))
    held = not_freed(forward)
    all_made = [event for event in forward if isinstance(event, Alloc)]
    prefix = f"{name}." if name else ""

    def of_layer(allocs: Iterable[Alloc], layer: str) -> list[int]:
        own = f"{prefix}{layer}"
        return [
            alloc.size_bytes
            for alloc in allocs
            if alloc.module == own or alloc.module.startswith(f"{own}.")
        ]

    return tuple(
        LayerBytes(sum(of_layer(held, layer)), max(of_layer(all_made, layer), default=0))
        for layer in layers
    )


@dataclass(frozen=True)
class _Cut:
    """An `nn.Sequential` in segments.

    Attributes:
        segments: How many.
        inputs_bytes: The inputs of all but the first one.
        largest_bytes: The activations of the largest one.
    """

    segments: int
    inputs_bytes: int
    largest_bytes: int


def _cuts(layers: Sequence[LayerBytes], least: int) -> list[_Cut]:
    outputs: list[int] = []
    for layer in layers:
        outputs.append(layer.largest_bytes or (outputs[-1] if outputs else 0))
    cuts = []
    for segments in range(least, len(layers) + 1):
        bounds = [number * len(layers) // segments for number in range(segments + 1)]
        inputs_bytes = sum(outputs[start - 1] for start in bounds[1:-1])
        largest_bytes = max(
            sum(layer.held_bytes for layer in layers[start:end]) for start, end in pairwise(bounds)
        )
        cuts.append(_Cut(segments, inputs_bytes, largest_bytes))
    return cuts


def sensible_segments(
    layers: Sequence[LayerBytes], *, least: int = 1, num_tried: int = NUM_TRIED
) -> list[int]:
    """The numbers of segments for which the least is expected to be held: all inputs of segments,
    and the activations of the largest.
    """
    cuts = sorted(
        _cuts(layers, least), key=lambda cut: (cut.inputs_bytes + cut.largest_bytes, cut.segments)
    )
    return sorted(cut.segments for cut in cuts[:num_tried])


def segments_together(layers: Mapping[str, Sequence[LayerBytes]]) -> dict[str, int]:
    """The numbers of segments of several `nn.Sequential`s, by name, for which the least is expected
    to be held, as for one.
    """
    cuts = {name: _cuts(of_one, 1) for name, of_one in layers.items()}
    no_less = max(min(cut.largest_bytes for cut in of_one) for of_one in cuts.values())

    def within(largest_bytes: int) -> dict[str, _Cut]:
        """Of each the cut with the smallest inputs whose segments are no larger."""
        return {
            name: min(
                (cut for cut in of_one if cut.largest_bytes <= largest_bytes),
                key=lambda cut: (cut.inputs_bytes, cut.segments),
            )
            for name, of_one in cuts.items()
        }

    def expected_bytes(largest_bytes: int) -> int:
        return largest_bytes + sum(cut.inputs_bytes for cut in within(largest_bytes).values())

    largest = {
        cut.largest_bytes
        for of_one in cuts.values()
        for cut in of_one
        if cut.largest_bytes >= no_less
    }
    best = min(sorted(largest), key=expected_bytes)
    return {name: cut.segments for name, cut in within(best).items()}
