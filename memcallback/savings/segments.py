"""Which parts of a model are worth checkpointing, and into how many segments, from a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from memcallback.core.allocation_trace import Alloc, Event, Free, PhaseEnd, PhaseStart
from memcallback.core.types import Phase
from memcallback.core.visible import visible_name
from memcallback.step.model import has_blocks, is_sequential, layer_containers

#: What `checkpoint` takes beside a model; None for the layers that it finds.
CheckpointParts = list[str] | dict[str, int] | None
#: How many numbers of segments are worth a trace of their own.
_NUM_TRIED = 5
#: Share of what all containers save; an `nn.Sequential` above it has several numbers of segments
#: tried for it alone.
_LARGE_SHARE = 0.3


def checkpoint_choices(
    model: nn.Module, events: Sequence[Event]
) -> Iterator[tuple[str, CheckpointParts]]:
    """Sensible arguments for `checkpoint(model, ...)`, each with a name for the saving."""
    try:
        names = layer_containers(model)
    except ValueError:  # the model has none
        return
    containers = {name: model.get_submodule(name) for name in names}
    layers = {name: layer_bytes(events, name, [*one._modules]) for name, one in containers.items()}
    sequentials = {
        name: layers[name]
        for name, container in containers.items()
        if is_sequential(container) and not has_blocks(container)
    }
    blocks = {
        f"{name}.{child}".lstrip("."): block
        for name, container in containers.items()
        if name not in sequentials
        for child, block in container.named_children()
    }
    if blocks:
        yield f"checkpoint {len(blocks)} blocks", None
    if len(blocks) > 3:
        second = [*blocks][::2]
        are_cut = all(is_sequential(blocks[name]) for name in second)
        yield "checkpoint every second block", dict.fromkeys(second, 1) if are_cut else second
    large = _large(sequentials, sum(map(_saved_bytes, layers.values())), at_least_one=not blocks)
    for name in large:
        of_name = f" of {visible_name(name)}" if len(containers) > 1 else ""
        num_tried = _NUM_TRIED if len(large) == 1 else _NUM_TRIED // len(large) + 1
        # The last segment of a whole model is not checkpointed, so there are at least two.
        least = 1 if name else 2
        for segments in sensible_segments(sequentials[name], least=least, num_tried=num_tried):
            number = f"{segments} segment{'' if segments == 1 else 's'}"
            yield f"checkpoint_sequential{of_name}, {number}", {name: segments}
    if len(sequentials) > 1 and not blocks:
        yield f"checkpoint {len(sequentials)} sequentials", segments_together(sequentials)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer allocates in a forward pass.

    Attributes:
        saved_bytes: What of it is live when the pass ends.
        largest_bytes: Its largest storage, as a rule its output; 0 for a layer that returns a view.
    """

    saved_bytes: int
    largest_bytes: int


def _saved_bytes(layers: Sequence[LayerBytes]) -> int:
    return sum(layer.saved_bytes for layer in layers)


def _large(
    sequentials: Mapping[str, Sequence[LayerBytes]], all_bytes: int, *, at_least_one: bool
) -> list[str]:
    """Names of the containers that save a good part of `all_bytes`, the largest first."""
    by_size = sorted(sequentials, key=lambda name: _saved_bytes(sequentials[name]), reverse=True)
    large = [name for name in by_size if _saved_bytes(sequentials[name]) > _LARGE_SHARE * all_bytes]
    return large or by_size[:at_least_one]


def layer_bytes(
    events: Sequence[Event], name: str, layers: Sequence[str]
) -> tuple[LayerBytes, ...]:
    """What each layer of a container allocates in the last forward pass of a trace."""
    allocs: dict[int, Alloc] = {}
    freed: set[int] = set()
    allocated: list[Alloc] = []
    saved: list[Alloc] = []
    for event in events:
        if isinstance(event, PhaseStart) and event.phase is Phase.FORWARD:
            allocs, freed = {}, set()
        elif isinstance(event, Alloc):
            allocs[event.id] = event
        elif isinstance(event, Free):
            freed.add(event.id)
        elif isinstance(event, PhaseEnd) and event.phase is Phase.FORWARD:
            allocated = [*allocs.values()]
            saved = [alloc for alloc in allocated if alloc.id not in freed]
    prefix = visible_name(f"{name}." if name else "")

    def sizes_in(allocs: Iterable[Alloc], layer: str) -> list[int]:
        fqn = f"{prefix}{visible_name(layer)}"
        return [
            alloc.size_bytes
            for alloc in allocs
            if alloc.module == fqn or alloc.module.startswith(f"{fqn}.")
        ]

    return tuple(
        LayerBytes(sum(sizes_in(saved, layer)), max(sizes_in(allocated, layer), default=0))
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
        largest_bytes = max(_saved_bytes(layers[start:end]) for start, end in pairwise(bounds))
        cuts.append(_Cut(segments, inputs_bytes, largest_bytes))
    return cuts


def sensible_segments(
    layers: Sequence[LayerBytes], *, least: int = 1, num_tried: int = _NUM_TRIED
) -> list[int]:
    """Numbers of segments expected to save least: all their inputs plus the largest segment."""
    cuts = sorted(
        _cuts(layers, least), key=lambda cut: (cut.inputs_bytes + cut.largest_bytes, cut.segments)
    )
    return sorted(cut.segments for cut in cuts[:num_tried])


def segments_together(layers: Mapping[str, Sequence[LayerBytes]]) -> dict[str, int]:
    """Numbers of segments, by name, for several `nn.Sequential`s that are checkpointed together."""
    cuts = {name: _cuts(of_one, 1) for name, of_one in layers.items()}
    least_largest = max(min(cut.largest_bytes for cut in of_one) for of_one in cuts.values())

    def within(largest_bytes: int) -> dict[str, _Cut]:
        """For each name the cut with the smallest inputs, no segment larger than the bound."""
        return {
            name: min(
                (cut for cut in of_one if cut.largest_bytes <= largest_bytes),
                key=lambda cut: (cut.inputs_bytes, cut.segments),
            )
            for name, of_one in cuts.items()
        }

    def expected_bytes(largest_bytes: int) -> int:
        return largest_bytes + sum(cut.inputs_bytes for cut in within(largest_bytes).values())

    bounds = {
        cut.largest_bytes
        for of_one in cuts.values()
        for cut in of_one
        if cut.largest_bytes >= least_largest
    }
    best = min(sorted(bounds), key=expected_bytes)
    return {name: cut.segments for name, cut in within(best).items()}
