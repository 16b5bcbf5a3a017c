"""Into how many segments an `nn.Sequential` is best cut, from what its layers hold in a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memcallback.events import Alloc, Event, Free, Phase, PhaseEnd, PhaseStart

#: How many numbers of segments are worth a trace of their own.
NUM_TRIED = 5


@dataclass(frozen=True)
class LayerBytes:
    """What a layer makes in a forward pass.

    Attributes:
        held_bytes: What of it stands when the pass ends.
        largest_bytes: The largest storage that it makes: its output, as a rule; 0 for a layer that only views its input.
    """

    held_bytes: int
    largest_bytes: int


def layer_bytes(events: Sequence[Event], name: str, num_layers: int) -> tuple[LayerBytes, ...]:
    """What each layer of an `nn.Sequential` makes in the last forward pass of a trace.

    Args:
        events: A step's trace.
        name: The name of the `nn.Sequential`; empty for the model itself.
        num_layers: How many layers it has.
    """
    made: dict[int, Alloc] = {}
    held, all_made = dict(made), dict(made)
    freed: set[int] = set()
    for event in events:
        if isinstance(event, PhaseStart) and event.phase is Phase.FORWARD:
            made, freed = {}, set()
        elif isinstance(event, Alloc):
            made[event.id] = event
        elif isinstance(event, Free):
            freed.add(event.id)
        elif isinstance(event, PhaseEnd) and event.phase is Phase.FORWARD:
            all_made, held = made, {number: alloc for number, alloc in made.items() if number not in freed}
    prefix = f"{name}." if name else ""

    def of_layer(allocs: Iterable[Alloc], layer: int) -> list[int]:
        own = f"{prefix}{layer}"
        return [alloc.size_bytes for alloc in allocs if alloc.module == own or alloc.module.startswith(f"{own}.")]

    return tuple(
        LayerBytes(sum(of_layer(held.values(), layer)), max(of_layer(all_made.values(), layer), default=0)) for layer in range(num_layers)
    )


def sensible_segments(layers: Sequence[LayerBytes], *, least: int = 1) -> list[int]:
    """The numbers of segments for which the least is expected to be held: all inputs of segments, and the activations of the largest.

    Args:
        layers: What each layer makes, at least 2.
        least: The least number of segments.

    Returns:
        At most NUM_TRIED of them, in ascending order.
    """
    outputs: list[int] = []
    for layer in layers:
        outputs.append(layer.largest_bytes or (outputs[-1] if outputs else 0))

    def expected_bytes(segments: int) -> int:
        bounds = [number * len(layers) // segments for number in range(segments + 1)]
        inputs = sum(outputs[start - 1] for start in bounds[1:-1])
        return inputs + max(sum(layer.held_bytes for layer in layers[start:end]) for start, end in pairwise(bounds))

    numbers = range(least, len(layers) + 1)
    return sorted(sorted(numbers, key=lambda segments: (expected_bytes(segments), segments))[:NUM_TRIED])
